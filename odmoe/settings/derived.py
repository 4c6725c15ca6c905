"""Lists of settings that follow from their declarations (`odmoe.settings.table.Declared`)."""

from __future__ import annotations

from odmoe.settings.settings import Settings

FIXED_WHILE_RUNNING = Settings.names_with(lambda one: one.fixed == "running")
FIXED_BY_UP = Settings.names_with(lambda one: one.fixed == "up")
FROM_CLUSTER = Settings.names_with(lambda one: one.from_cluster)
SERVE_FLAGS = Settings.names_with(lambda one: one.serve)
VERIFY_FLAGS = Settings.names_with(lambda one: one.verify)
HERE_ONLY = Settings.names_with(lambda one: one.here_only)
LASTING_ONLY = Settings.names_with(lambda one: one.lasting_only)
OUTPUT_FILES = Settings.names_with(lambda one: one.output_file)
