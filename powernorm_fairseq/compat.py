"""What the installed fairseq, torch and Python need before the plugin can work."""


def check_versions() -> None:
    """Raise ImportError that names what to install when a version cannot work."""


def apply() -> None:
    """Mend fairseq in place; only what the installed versions need; a second call does nothing."""
