"""The commit that made a version slower: which commits there are, which to try next, and how a commit is measured."""
