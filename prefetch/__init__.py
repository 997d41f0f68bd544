"""How experts come into memory in time: transfers between the disk and the tiers."""

if __name__ != "edgemoe.prefetch":
    raise ImportError(
        f"expected a module {__name__} of another project, got a folder of edgemoe's checkout, which is "
        f"edgemoe.prefetch: start in another directory, or take the checkout off the import path ({__file__})"
    )
