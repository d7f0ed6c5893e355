"""`canary-obs completion`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from canary_obs.cli.output import write_out
from canary_obs.errors import ConfigurationError

SHELLS = ("bash", "zsh", "fish")
_BASH = """\
_canary_obs() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" path="" word
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$path $word" in
{steps}
    esac
  done
  case "$path" in
{words}
  esac
  [[ ${{#COMPREPLY[@]}} -eq 0 ]] && COMPREPLY=($(compgen -f -- "$current"))
}}
complete -o filenames -F _canary_obs canary-obs
"""


def completion(
    context: typer.Context,
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="Of this shell.")],
) -> None:
    """Print a script that completes commands and options: eval "$(canary-obs completion bash)"."""
    if shell not in SHELLS:
        raise ConfigurationError("completion", shell, "no such shell", f"Use one of: {', '.join(SHELLS)}.")
    write_out(script(context.find_root().command, shell))


def script(program: Any, shell: str) -> str:
    """A completion script of every command, for `bash`, `zsh` or `fish`."""
    known = words_of(program)
    if shell == "fish":
        return _fish(known)
    steps = "\n".join(f'      "{path}") path="{path}" ;;' for path in known if path)
    lines = "\n".join(
        f'    "{path}") COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$current")) ;;'
        for path, words in known.items()
    )
    body = _BASH.format(steps=steps, words=lines)
    return body if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{body}"


def words_of(program: Any, path: str = "") -> dict[str, list[str]]:
    """By the words of a command, each after a space: what may follow them, commands first."""
    commands = getattr(program, "commands", {})
    options = [name for parameter in program.params for name in parameter.opts if name.startswith("-")]
    found = {path: [*commands, *options, "--help"]}
    for name, command in commands.items():
        found |= words_of(command, f"{path} {name}")
    return found


def _fish(known: dict[str, list[str]]) -> str:
    lines = ["complete -c canary-obs -e"]
    for path, words in known.items():
        inner = [word for word in words if not word.startswith("-")]
        seen = "; and ".join(f"__fish_seen_subcommand_from {name}" for name in path.split())
        without = f"not __fish_seen_subcommand_from {' '.join(inner)}" if inner else ""
        condition = "; and ".join(filter(None, (seen, without)))
        when = f' -n "{condition}"' if condition else ""
        if inner:
            lines.append(f'complete -c canary-obs -f{when} -a "{" ".join(inner)}"')
        lines += [f"complete -c canary-obs{when} -l {word[2:]}" for word in words if word.startswith("--")]
    return "\n".join(lines) + "\n"
