"""Seeded defects of the command line's refusals and of what it prints."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_USAGE = "tests/cli/test_usage.py::"
_OUTPUT = "tests/cli/test_output.py::"
_ONE_LINE = _USAGE + "test_a_refused_command_line_is_one_line"

COMMANDS = mutants(
    "canary_obs/cli/__init__.py",
    ("    except _Refusal as refusal:\n", "    except typer.Abort as refusal:\n", _ONE_LINE),
    ("if argument == option]", "if argument != option]", _ONE_LINE),
    ("        words.append(word)\n", "", _ONE_LINE),
    (
        '" ".join(line.splitlines())',
        "line",
        _USAGE + "test_a_line_break_that_was_given_does_not_break_the_line",
    ),
    (
        'if type(refusal).__name__ == "NoArgsIsHelpError":',
        "if False:",
        _USAGE + "test_no_command_at_all_shows_the_help_page",
    ),
    ("        _drop(sys.stdout)\n", "", _OUTPUT + "test_a_full_device_is_one_line"),
    (
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)",
        "pass",
        _OUTPUT + "test_a_reader_that_left_ends_the_command_as_it_ends_other_tools",
    ),
    (
        "        return 130\n",
        "        return 1\n",
        _USAGE + "test_an_interrupted_command_ends_without_a_traceback",
    ),
)

PRINTED = mutants(
    "canary_obs/cli/output.py",
    ("if sys.stdout is None:", "if False:", _OUTPUT + "test_a_closed_output_is_one_line"),
)

OPTIONS = mutants(
    "canary_obs/cli/options.py",
    (
        "            path.unlink()\n",
        "            pass\n",
        _USAGE + "test_an_output_is_tried_and_left_as_it_was",
    ),
    ("        read_result(path)\n", "", _ONE_LINE),
    ('if find_spec("vllm") is None:', "if False:", _USAGE + "test_a_bench_of_vllm_says_that_vllm_is_missing"),
)

UNKNOWN = mutants(
    "canary_obs/config.py",
    (
        "UnknownSetting(label, None,",
        "ConfigurationError(label, name,",
        "tests/test_config.py::test_an_unknown_variable_is_named_without_its_value",
    ),
)

ALL = COMMANDS + PRINTED + OPTIONS + UNKNOWN
