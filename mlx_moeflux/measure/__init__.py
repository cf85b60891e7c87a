"""What users run to measure, plan and compare."""
