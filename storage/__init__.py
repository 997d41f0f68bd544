"""How experts lie on disk and in memory: record format, conversion, readers and writers. Knows no tokens."""

if __name__ != "edgemoe.storage":
    raise ImportError(
        f"expected a module {__name__} of another project, got a folder of edgemoe's checkout, which is "
        f"edgemoe.storage: start in another directory, or take the checkout off the import path ({__file__})"
    )
