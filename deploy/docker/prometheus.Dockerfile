# Prometheus of Debian's package, for where no image registry is reached:
#   docker build --build-arg BASE=flexmarl-base -f deploy/docker/prometheus.Dockerfile -t flexmarl-prometheus .
#   PROMETHEUS_IMAGE=flexmarl-prometheus docker compose up -d
ARG BASE=debian:bookworm-slim
FROM ${BASE}
RUN apt-get update \
 && apt-get install -y --no-install-recommends prometheus \
 && rm -rf /var/lib/apt/lists/* \
 && install -d -o prometheus -g prometheus /prometheus
USER prometheus
EXPOSE 9090
ENTRYPOINT ["prometheus", "--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
