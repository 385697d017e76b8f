"""Commands of ``ebflow``, run in this process."""

from typer.testing import CliRunner

from ebflow_examples.cli import app


def ebflow(*arguments, code=0):
    """Runs a command, and checks its exit code."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done


def refused(*arguments, code=2):
    """Runs a command that fails, and returns its message: one line, the last on the standard error."""
    text = ebflow(*arguments, code=code).stderr.strip()
    assert text.splitlines()[-1].startswith("error: "), text
    return text.splitlines()[-1]


def refused_at_length(*arguments, code=2):
    """Runs a command that fails, and returns its message, which may have many lines, as one; there is no traceback."""
    text = ebflow(*arguments, code=code).stderr
    assert "Traceback" not in text
    return " ".join(text[text.index("error: ") :].split())
