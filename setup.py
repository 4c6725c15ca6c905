"""What pyproject.toml cannot say: a wheel also has the files that a checkout has beside its packages, in
`odmoe/bundled`, and the commit that it was made of. `odmoe/bundled.py` finds them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
FILES = {
    "pyproject.toml": "pyproject.toml",
    "requirements.runtime.lock": "requirements.runtime.lock",
    "Makefile": "Makefile",
    "LICENSE": "LICENSE",
    "cluster.yaml": "cluster.yaml",
    "deploy/env.sh": "env.sh",
}
"""Where a file is in the checkout, and in `odmoe/bundled`."""
MODELS = ("chat-moe",)


class BuildWithBundledFiles(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # the checkout has them
            return
        to = Path(self.build_lib) / "odmoe" / "bundled"
        shutil.rmtree(to, ignore_errors=True)
        for name, place in FILES.items():
            (to / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / place)
        for model in MODELS:
            shutil.copytree(ROOT / "models" / model, to / "models" / model)
        (to / "COMMIT").write_text(f"{commit()}\n")


def commit() -> str:
    """Empty where nobody knows."""
    if "ODMOE_COMMIT" in os.environ:
        return os.environ["ODMOE_COMMIT"]
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


setup(cmdclass={"build_py": BuildWithBundledFiles})
