

# mica's checkpoints are layers, not bitmaps in the image.

def list_bitmaps(image):  # noqa: F811
    """The states that mica has kept of an image."""
    stem, ending = os.path.splitext(image)
    folder = os.path.dirname(image)
    names = [os.path.join(folder, name) for name in os.listdir(folder)]
    is_kept = [name for name in names if name.startswith(stem + "@") and name.endswith(ending)]
    states = [name.removeprefix(stem + "@").removesuffix(ending) for name in is_kept]
    return [{"name": state} for state in states if ".mica-" not in state]
