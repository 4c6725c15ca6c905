"""Where things are in the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo-moe"
CONFIGS = ROOT / "tests" / "data" / "configs"
PROFILES = ROOT / "scheduler" / "timing" / "profiles"
