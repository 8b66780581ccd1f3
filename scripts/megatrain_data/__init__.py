# SPDX-License-Identifier: Apache-2.0
"""Data files to token shards, with the reference libraries for tokenizers and chat templates."""
