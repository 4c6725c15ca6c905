"""Where the project's things are. Imported before any library that could reach for the network."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
DATA = ROOT / "scripts" / "data"
DEMO = ROOT / "models" / "demo-moe"
DEEP = ROOT / "models" / "deep-moe"
