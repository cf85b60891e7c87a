"""Commands that measure, plan and compare."""
