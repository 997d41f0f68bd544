"""Tiers of fixed-size blocks that keep experts in memory, their eviction, and the budget that limits them."""

if __name__ != "edgemoe.cache":
    raise ImportError(
        f"expected a module {__name__} of another project, got a folder of edgemoe's checkout, which is "
        f"edgemoe.cache: start in another directory, or take the checkout off the import path ({__file__})"
    )
