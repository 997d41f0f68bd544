"""Hashes of a known matrix packed in each layout. A store records its layout's, and a reader compares it.

Written out, so that a manifest is read without packing a matrix; tests/storage/record/test_layout.py packs it.
"""

PROBES = {
    "cpu-avx512": "23ff985c35043cc0",
    "cpu-avx2": "d973e1e47f2ecaee",
    "cpu-generic": "7cd64b8cbbb1c2c1",
    "cpu-avx2-paired": "15e5ecdda8abbd11",
    "cuda": "00ca95bbdbe5b008",
}
"""Layout's name -> hash (storage.record.layout has the layouts)."""
