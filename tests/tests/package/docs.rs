//! What the pages of docs/ say of the code is so.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Adds the names of all test functions in `folder`.
fn tests_in(folder: &Path, names: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).expect("a folder").flatten() {
        let path = entry.path();
        if path.is_dir() {
            tests_in(&path, names);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            let text = fs::read_to_string(&path).expect("it is text");
            let lines: Vec<_> = text.lines().map(str::trim).collect();
            let found = lines.windows(2).filter(|pair| pair[0] == "#[test]");
            let name = |line: &str| Some(line.strip_prefix("fn ")?.split('(').next()?.to_owned());
            names.extend(found.filter_map(|pair| name(pair[1])));
        }
    }
}

#[test]
fn each_test_that_the_table_of_layers_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut tests = BTreeSet::new();
    tests_in(&root.join("tests"), &mut tests);
    let page = fs::read_to_string(root.join("../docs/layers.md")).expect("it is there");
    let rows = page.lines().filter(|line| line.starts_with("| **"));
    let named: Vec<_> = rows.flat_map(|row| row.split('`').skip(1).step_by(2)).collect();
    let named: Vec<_> = named.iter().filter(|word| word.contains('_')).collect();
    assert!(named.len() >= 20, "{} tests are named", named.len());
    for test in named {
        assert!(tests.contains(*test), "docs/layers.md names {test}, which is no test");
    }
}
