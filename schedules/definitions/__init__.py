"""What the TE graphs of several operators share: zeros beyond the ends, the epilogue, stores in another layout."""
