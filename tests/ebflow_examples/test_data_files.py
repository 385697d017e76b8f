"""A user's own files as data: folders of images, arrays and tables."""

import numpy as np
import pytest
import torch
from PIL import Image

from ebflow_examples.data import load
from ebflow_plugin.errors import InputError, UnknownNameError


def image_folder(path, count=10, size=(6, 4), mode="RGB"):
    path.mkdir(parents=True, exist_ok=True)
    for place in range(count):
        Image.new(mode, size, place if mode == "L" else (place, 0, 255)).save(path / f"{place}.png")
    return path


def test_a_folder_of_images(tmp_path):
    image_folder(tmp_path / "a" / "b")
    (tmp_path / "notes.txt").write_text("not an image")
    data = load(str(tmp_path))
    assert data.event_shape == (3, 4, 6)
    assert data.levels == 256
    assert sorted(torch.cat([data.train, data.validation, data.test])[:, 0, 0, 0].tolist()) == list(range(10))
    assert (data.train[:, 2] == 255).all()


def test_grey_images_stay_grey_unless_others_have_colour(tmp_path):
    image_folder(tmp_path / "grey", mode="L")
    assert load(str(tmp_path)).event_shape == (1, 4, 6)
    image_folder(tmp_path / "colour", count=1)
    assert load(str(tmp_path)).event_shape == (3, 4, 6)


def test_images_of_several_sizes(tmp_path):
    image_folder(tmp_path / "a")
    image_folder(tmp_path / "b", count=1, size=(9, 4))
    with pytest.raises(InputError, match="differ in size: .*a/0.png has 4 x 6 pixels, .*b/0.png has 4 x 9"):
        load(str(tmp_path))


def test_folders_that_are_no_good(tmp_path):
    with pytest.raises(InputError, match="has no images"):
        load(str(tmp_path))
    image_folder(tmp_path, count=3)
    with pytest.raises(InputError, match="has 3 rows or images; at least 10"):
        load(str(tmp_path))
    (tmp_path / "broken.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"broken\.png is no image"):
        load(str(tmp_path))


def save(path, array):
    np.save(path, array)
    return str(path)


@pytest.mark.parametrize(
    ("shape", "event"), [((12, 4, 6), (1, 4, 6)), ((12, 3, 4, 6), (3, 4, 6)), ((12, 4, 6, 3), (3, 4, 6))]
)
def test_bytes_are_images(tmp_path, shape, event):
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    data = load(save(tmp_path / "x.npy", array))
    assert data.event_shape == event
    assert data.levels == 256
    assert data.train.dtype == torch.float32
    whole = torch.cat([data.train, data.validation, data.test])
    assert whole.sum().item() == array.sum()


def test_bytes_of_vectors_are_grey_levels_too(tmp_path):
    data = load(save(tmp_path / "x.npy", np.zeros((12, 5), dtype=np.uint8)))
    assert data.levels == 256
    assert data.event_shape == (5,)


def test_an_npz_file(tmp_path):
    parts = {name: np.full((size, 2), size) for size, name in enumerate(("train", "validation", "test"), start=3)}
    np.savez(tmp_path / "x.npz", **parts)
    data = load(str(tmp_path / "x.npz"))
    assert [len(part) for part in (data.train, data.validation, data.test)] == [3, 4, 5]
    np.savez(tmp_path / "one.npz", np.zeros((20, 2)))
    assert load(str(tmp_path / "one.npz")).event_shape == (2,)
    np.savez(tmp_path / "two.npz", a=np.zeros((20, 2)), b=np.zeros((20, 2)))
    with pytest.raises(InputError, match="has the arrays a, b; it should have one, or train"):
        load(str(tmp_path / "two.npz"))
    np.savez(tmp_path / "differ.npz", **{**parts, "test": np.zeros((5, 3))})
    with pytest.raises(InputError, match="differ in their shapes"):
        load(str(tmp_path / "differ.npz"))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([[1.0, np.nan]] * 12), "12 values that are NaN or infinite, the first in row 0, column 1"),
        (np.full((12, 2), np.inf), "24 values that are NaN or infinite"),
        (np.zeros(12), r"shape \(12,\) and type float64; wanted are rows"),
        (np.zeros((12, 3, 4, 5)), "images as uint8"),
        (np.zeros((12, 5, 4, 6), dtype=np.uint8), "1 or 3 channels"),
        (np.zeros((0, 3)), "is empty"),
        (np.array([["a", "b"]] * 12), "not numbers"),
        (np.zeros((12, 2), dtype=complex), "not numbers"),
        (np.zeros((9, 2)), "has 9 rows or images; at least 10"),
    ],
)
def test_arrays_that_are_no_good(tmp_path, array, message):
    with pytest.raises(InputError, match=message):
        load(save(tmp_path / "x.npy", array))


def test_files_that_are_no_good(tmp_path):
    with pytest.raises(InputError, match=r"is not there: looked for .*gone\.npy"):
        load(str(tmp_path / "gone.npy"))
    (tmp_path / "x.npy").write_bytes(b"no array")
    with pytest.raises(InputError, match="cannot be read as a NumPy file"):
        load(str(tmp_path / "x.npy"))
    (tmp_path / "x.xlsx").write_bytes(b"")
    with pytest.raises(UnknownNameError, match=r"is no \.npy, \.npz or \.csv file"):
        load(str(tmp_path / "x.xlsx"))


@pytest.mark.parametrize("head", ["", "x,y\n", ",y\n"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_csv_file(tmp_path, head, delimiter):
    text = head + "".join(f"{row},{row / 2}\n" for row in range(12)) + "\n"
    (tmp_path / "x.csv").write_text(text.replace(",", delimiter))
    data = load(str(tmp_path / "x.csv"))
    whole = torch.cat([data.train, data.validation, data.test])
    assert whole.shape == (12, 2)
    assert torch.equal(whole[:, 1], whole[:, 0] / 2)
    assert data.levels is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x,name\n1,a\n", r"column 'name' has 'a' in data row 0 \(counted from 0\), which is no number"),
        ("1,2\n3,b\n", "column '1' has 'b' in data row 1"),
        ("x,y\n1,2\n1\n", "data row 1 has 1 cells, but there are 2 columns"),
        ("x,y\n" + "1,\n" * 12, "12 values that are NaN or infinite, the first in row 0, column 1"),
        ("x,y\n", "has no rows below its header, x, y"),
        ("", "is empty"),
        ("\x00\xff", "no number|is no text"),
    ],
)
def test_csv_files_that_are_no_good(tmp_path, text, message):
    (tmp_path / "x.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=message):
        load(str(tmp_path / "x.csv"))


ROWS = "".join(f"{row * row},{row / 2},{-row}\n" for row in range(12))


def read(tmp_path, capsys, first, header=None, rows=ROWS):
    """The rows of a file with this first line, and what was said about it."""
    (tmp_path / "x.csv").write_text(first + "\n" + rows)
    data = load(str(tmp_path / "x.csv"), header=header)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    return len(data.train) + len(data.validation) + len(data.test), data.header, said[0]


@pytest.mark.parametrize(
    ("first", "header"),
    [
        ("a,b,c", True),
        (",b,c", True),
        ("a b, 1st ,x", True),
        ("2019_20,2020_21,2021_22", True),  # numbers to Python alone
        ('"2019","2020","2021"', True),  # over numbers without quotes
        ("2019,2020,2021", False),
        ("1e5,-2,.5", False),
    ],
)
def test_what_was_taken_for_the_header_is_said(tmp_path, capsys, first, header):
    shown = ", ".join(cell.strip(' "') or "(empty)" for cell in first.split(","))
    count, found, said = read(tmp_path, capsys, first)
    assert (count, found) == (12 + (not header), header)
    words = (
        f"the header is {shown} (--no-header" if header else f"no header, {shown} is the first row of data (--header"
    )
    assert words in said


def test_a_header_of_numbers_is_one_if_told_so(tmp_path, capsys):
    assert read(tmp_path, capsys, "2019,2020,2021", header=True)[:2] == (12, True)
    assert read(tmp_path, capsys, '"2019","2020","2021"', header=False)[:2] == (13, False)
    assert read(tmp_path, capsys, "id,2019,2020", header=True)[:2] == (12, True)
    quoted = "".join('"' + line.replace(",", '","') + '"\n' for line in ROWS.splitlines())
    assert read(tmp_path, capsys, '"2019","2020","2021"', rows=quoted)[:2] == (13, False)  # all numbers have quotes


@pytest.mark.parametrize("first", ["id,2019,2020", ",2019,2020", "n/a,1,2", "x,inf,nan"])
def test_a_first_line_of_words_and_numbers_is_for_the_user_to_tell(tmp_path, first):
    (tmp_path / "x.csv").write_text(first + "\n" + ROWS)
    with pytest.raises(InputError, match="may be a header or data: --header takes it for names, --no-header for a row"):
        load(str(tmp_path / "x.csv"))


@pytest.mark.parametrize("first", ["nan,1e5,inf", "nan,nan,nan", "1,,3\n4,,6"])
def test_numbers_that_are_none_are_data(tmp_path, first):
    (tmp_path / "x.csv").write_text(first + "\n" + ROWS)
    with pytest.raises(InputError, match="values that are NaN or infinite, the first in row 0"):
        load(str(tmp_path / "x.csv"))


def test_text_that_is_told_to_be_data_names_the_way_out(tmp_path):
    (tmp_path / "x.csv").write_text("a,b,c\n" + ROWS)
    with pytest.raises(InputError, match="has 'a' in data row 0 .* take the first line for names, with --header"):
        load(str(tmp_path / "x.csv"), header=False)


def test_an_index_is_named(tmp_path, capsys):
    rows = "".join(f"{row},{row * row}\n" for row in range(12))
    assert "column 'id' counts the rows, and is data too" in read(tmp_path, capsys, "id,x", rows=rows)[2]
    assert "counts the rows" not in read(tmp_path, capsys, "a,b,c")[2]


@pytest.mark.parametrize("name", ["digits", "x.npy", "."])
def test_a_header_is_of_csv_files_alone(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.zeros((12, 2)))
    with pytest.raises(InputError, match="is the first line of a .csv file, and .* is none"):
        load(name, header=True)
