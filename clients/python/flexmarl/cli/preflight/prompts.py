"""Are the prompt templates ones that a call can fill?"""

from __future__ import annotations

from string import Formatter

from flexmarl.cli.errors import CliError
from flexmarl.runtime.run_config import RunConfig


def check_prompts(config: RunConfig) -> None:
    """Looks at the placeholders of every agent's template.

    Raises:
        CliError: A brace is left open, or a placeholder is not a plain name: calls fill templates
            by keyword, and attribute or index access would reach into the user's objects.
    """
    for name, agent in config.agents.items():
        # A system message is no template: it goes to the model as it stands.
        if agent.prompt is not None:
            _check_template(f"agents.{name}.prompt", agent.prompt)


def _check_template(key: str, template: str) -> None:
    try:
        fields = [
            field + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            for _, field, spec, conversion in Formatter().parse(template)
            if field is not None
        ]
    except ValueError as error:
        raise CliError(f"{key}: {error}; write a brace as {{{{ or }}}}") from None
    for field in fields:
        if not field.isidentifier():
            raise CliError(
                f"{key}: placeholder {{{field}}} is not a plain name; calls fill placeholders by "
                "keyword argument"
            )
