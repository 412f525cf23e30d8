"""The checks of `raymq doctor`, by subject. Each check is a pure function from a DoctorSnapshot to findings, so that
tests need no broken machine."""
