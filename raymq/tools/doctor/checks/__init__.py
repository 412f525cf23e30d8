"""The checks, by subject: pure functions from a DoctorSnapshot to findings, so that tests need no broken machine."""
