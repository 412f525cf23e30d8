"""The doctor's checks, by subject. Each is a pure function from a DoctorSnapshot to findings, so that tests need no
broken machine."""
