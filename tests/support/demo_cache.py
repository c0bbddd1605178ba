"""The demo's cache, without a warm start."""

from salesrl_trl.demo import policy


def demo_cache(folder, policy_path, steps=280, seed=0):
    """A `SALESRL_CACHE_DIR` that has `policy_path` in place of the policy of `steps` steps and `seed`."""
    kept = folder / "policies" / policy._policy_folder(steps, seed).name
    kept.parent.mkdir(parents=True)
    kept.symlink_to(policy_path)
    return folder
