"""Generate the stubs in wire/ from proto/odmoe.proto.

python scripts/generate_stubs.py            write wire/odmoe_pb2.py, .pyi and wire/odmoe_pb2_grpc.py
python scripts/generate_stubs.py --check    exit 1 if what is committed is not what the source gives
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUBS = ("wire/odmoe_pb2.py", "wire/odmoe_pb2.pyi", "wire/odmoe_pb2_grpc.py")


def generate(out: Path) -> None:
    """Write the stubs under `out`/wire. Raises `CalledProcessError` when protoc refuses the source."""
    outputs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "pyi")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iwire=proto", *outputs, "wire/odmoe.proto"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)


def stale(committed: Path, fresh: Path) -> list[str]:
    """The stubs under `committed` that are missing or differ from those under `fresh`."""

    def same(name: str) -> bool:
        return (committed / name).is_file() and (committed / name).read_bytes() == (fresh / name).read_bytes()

    return [name for name in STUBS if not same(name)]


def check(committed: Path = ROOT) -> int:
    """0 if the stubs under `committed` are up to date, else 1, having said which are not."""
    with tempfile.TemporaryDirectory() as fresh:
        generate(Path(fresh))
        names = stale(committed, Path(fresh))
    if names:
        print(
            f"{', '.join(names)}: not what proto/odmoe.proto gives with this grpcio-tools; "
            "run `python scripts/generate_stubs.py` and commit the result",
            file=sys.stderr,
        )
    return 1 if names else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the stubs are out of date")
    if parser.parse_args().check:
        return check()
    generate(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
