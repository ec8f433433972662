//! Which files of a crate name which others of it, judging by paths in the text.
//!
//! A path is followed through re-exports to the file that has the item: a file that names
//! `crate::index::Slice` names `index/slice.rs` if `index.rs` has only `pub use slice::Slice`. A
//! `mod x;` and a re-export are not arrows by themselves, nor is naming a module without anything
//! in it. A module and the contents of its folder are one room: if a file there names the modules
//! that it lies in, that is not an arrow either, unless it is the crate's root, which is not a
//! room. Tests are left out. Methods and macros are not seen.

use super::scan;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// How many re-exports a name may pass through.
const REEXPORTS_MAX: usize = 16;

/// From a file to those that it names.
pub(super) type Arrows = BTreeMap<PathBuf, BTreeSet<PathBuf>>;
type Name = Vec<String>;

/// A module: a file, or a part of one.
#[derive(Default)]
struct Module {
    file: PathBuf,
    children: BTreeSet<String>,
    aliases: BTreeMap<String, Name>,
}

/// The modules of a crate, and what they name.
#[derive(Default)]
struct Crate {
    modules: BTreeMap<Name, Module>,
    /// A path, and the module whose text contains it.
    named: Vec<(Name, Name)>,
    /// Modules that only tests have.
    tests: BTreeSet<Name>,
}

/// The target of a path.
enum Place {
    Module(Name),
    /// Something in the text of a module.
    Item(Name),
}

/// The arrows between `files` of one crate, whose sources lie in `folder`.
pub(super) fn arrows<'a>(
    folder: &Path,
    files: impl IntoIterator<Item = (&'a Path, &'a str)>,
) -> Arrows {
    let mut found = Crate::default();
    for (file, text) in files {
        if let Ok(inner) = file.strip_prefix(folder) {
            found.read(file, module_of(inner), text);
        }
    }
    let mut arrows = Arrows::new();
    for (module, path) in &found.named {
        let Some(Module { file, .. }) = found.modules.get(module) else { continue };
        if found.is_test(module) {
            continue;
        }
        let Some(Place::Item(place)) = found.follow(module, path, 0) else { continue };
        let is_in_room = !place.is_empty() && module.starts_with(&place);
        let Some(Module { file: other, .. }) = found.modules.get(&place) else { continue };
        if other != file && !is_in_room {
            arrows.entry(file.clone()).or_default().insert(other.clone());
        }
    }
    arrows
}

/// The path of the module that is file `inner` of the crate's sources.
fn module_of(inner: &Path) -> Name {
    let mut parts: Name =
        inner.with_extension("").iter().map(|part| part.to_string_lossy().into_owned()).collect();
    if matches!(parts.last().map(String::as_str), Some("mod" | "lib" | "main")) {
        parts.pop();
    }
    parts
}

impl Crate {
    fn read(&mut self, file: &Path, module: Name, text: &str) {
        let code = scan::code_only(text);
        let tokens = tokens(&code);
        self.modules.entry(module.clone()).or_default().file = file.to_owned();
        // For each open brace, whether it is that of a module.
        let mut braces: Vec<bool> = Vec::new();
        let mut current = module;
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            let next = |ahead: usize| tokens.get(at + ahead).copied().unwrap_or_default();
            match *token {
                "mod" if matches!(next(2), ";" | "{") => {
                    let child = next(1).to_owned();
                    let path = joined(&current, &child);
                    if child == "tests" || is_for_tests(&tokens[..at]) {
                        self.tests.insert(path.clone());
                    }
                    self.module(&current).children.insert(child);
                    if next(2) == "{" {
                        braces.push(true);
                        self.module(&path).file = file.to_owned();
                        current = path;
                    }
                    at += 3;
                }
                "{" => {
                    braces.push(false);
                    at += 1;
                }
                "}" => {
                    if braces.pop() == Some(true) {
                        current.pop();
                    }
                    at += 1;
                }
                "use" if next(1) != "<" => {
                    let is_exported = at > 0 && matches!(tokens[at - 1], "pub" | ")");
                    at = self.read_use(&tokens, at + 1, &current, is_exported);
                }
                "::" => at += 2,
                first if next(1) == "::" => {
                    let mut path = vec![first.to_owned()];
                    at += 1;
                    while tokens.get(at) == Some(&"::") && is_word(tokens.get(at + 1)) {
                        path.push(tokens[at + 1].to_owned());
                        at += 2;
                    }
                    self.named.push((current.clone(), path));
                }
                _ => at += 1,
            }
        }
    }

    fn module(&mut self, path: &[String]) -> &mut Module {
        self.modules.entry(path.to_vec()).or_default()
    }

    /// Parses the tree of a `use` from `at` on, and returns where it ends.
    fn read_use(&mut self, tokens: &[&str], at: usize, module: &[String], exported: bool) -> usize {
        let mut leaves = Vec::new();
        let end = tree(tokens, at, &mut Name::new(), &mut leaves);
        for (path, name) in leaves {
            if !exported {
                self.named.push((module.to_vec(), path.clone()));
            }
            if name != "_" {
                self.module(module).aliases.insert(name, path);
            }
        }
        end
    }

    fn is_test(&self, module: &[String]) -> bool {
        (1..=module.len()).any(|len| self.tests.contains(&module[..len]))
    }

    /// The target of `path` in the text of `module`; `None` if it leaves the crate.
    fn follow(&self, module: &[String], path: &[String], depth: usize) -> Option<Place> {
        let (first, rest) = path.split_first()?;
        let start = match first.as_str() {
            "crate" => Place::Module(Vec::new()),
            "self" => Place::Module(module.to_vec()),
            "super" => Place::Module(module.split_last()?.1.to_vec()),
            name => self.named_in(module, name, depth)?,
        };
        rest.iter().try_fold(start, |place, part| match place {
            Place::Item(_) => Some(place),
            Place::Module(module) if part == "super" => {
                Some(Place::Module(module.split_last()?.1.to_vec()))
            }
            Place::Module(module) => {
                let own = &self.modules.get(&module)?;
                let is_known = own.children.contains(part) || own.aliases.contains_key(part);
                match is_known {
                    true => self.named_in(&module, part, depth),
                    false => Some(Place::Item(module)),
                }
            }
        })
    }

    /// The meaning of `name` in `module`, if it is a module in it or an alias.
    fn named_in(&self, module: &[String], name: &str, depth: usize) -> Option<Place> {
        let own = self.modules.get(module)?;
        if own.children.contains(name) {
            return Some(Place::Module(joined(module, name)));
        }
        let alias = own.aliases.get(name).filter(|_| depth < REEXPORTS_MAX)?;
        // `use x::x;` with a crate x of others.
        if alias.first().is_some_and(|first| first == name && own.aliases.contains_key(first)) {
            return None;
        }
        self.follow(module, alias, depth + 1)
    }
}

fn joined(module: &[String], child: &str) -> Name {
    module.iter().cloned().chain([child.to_owned()]).collect()
}

/// Whether the item after `before` is under `#[cfg(test)]`.
fn is_for_tests(before: &[&str]) -> bool {
    let visibility = before.iter().rev().take_while(|token| **token != "]").count();
    let before = &before[..before.len() - visibility];
    visibility <= 4 && before.ends_with(&["#", "[", "cfg", "(", "test", ")", "]"])
}

/// Parses the names of a `use` from `at` on: whole paths, and what each is called here. Returns
/// where it ends.
fn tree(
    tokens: &[&str],
    mut at: usize,
    prefix: &mut Name,
    leaves: &mut Vec<(Name, String)>,
) -> usize {
    let len = prefix.len();
    let mut is_leaf = true;
    while let Some(token) = tokens.get(at) {
        match *token {
            "::" => at += 1,
            "{" => {
                is_leaf = false;
                at += 1;
                while tokens.get(at).is_some_and(|token| *token != "}") {
                    at = tree(tokens, at, prefix, leaves);
                    at += usize::from(tokens.get(at) == Some(&","));
                }
                at += 1;
            }
            "as" => {
                leaves.push((prefix.clone(), tokens.get(at + 1).unwrap_or(&"_").to_string()));
                is_leaf = false;
                at += 2;
            }
            "self" if prefix.len() > len || len > 0 => at += 1,
            token if is_word(Some(&token)) => {
                prefix.push(token.to_owned());
                at += 1;
            }
            "*" => {
                prefix.push("*".to_owned());
                at += 1;
            }
            _ => break,
        }
    }
    if is_leaf && let Some(name) = prefix.last().cloned() {
        leaves.push((prefix.clone(), name));
    }
    prefix.truncate(len);
    at
}

fn is_word(token: Option<&&str>) -> bool {
    token
        .is_some_and(|token| token.starts_with(|first: char| first.is_alphabetic() || first == '_'))
}

/// Words, `::`, and other signs one by one.
fn tokens(code: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let is_part = |letter: char| letter.is_alphanumeric() || letter == '_';
        let len = match first {
            _ if is_part(first) => rest.find(|letter| !is_part(letter)).unwrap_or(rest.len()),
            ':' if rest.starts_with("::") => 2,
            _ => first.len_utf8(),
        };
        tokens.push(&rest[..len]);
        rest = rest[len..].trim_start();
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let files = files.iter().map(|(file, text)| (Path::new(*file), *text));
        let arrows = arrows(Path::new("src"), files);
        let pairs = arrows.iter().flat_map(|(from, to)| to.iter().map(move |to| (from, to)));
        let short = |file: &Path| file.strip_prefix("src").expect("in src").display().to_string();
        pairs.map(|(from, to)| format!("{} {}", short(from), short(to))).collect()
    }

    #[test]
    fn a_path_leads_to_the_file_that_has_the_item() {
        let files = [
            ("src/lib.rs", "mod a;\nmod b;\npub use b::deep::Deep;\n"),
            ("src/a.rs", "use crate::Deep;\nuse crate::b::{self, Own as Other};\n"),
            ("src/b/mod.rs", "pub(crate) mod deep;\npub(crate) struct Own;\n"),
            ("src/b/deep.rs", "pub struct Deep;\nfn f(x: super::Own) {}\n"),
        ];
        assert_eq!(found(&files), ["a.rs b/deep.rs", "a.rs b/mod.rs"]);
    }

    #[test]
    fn declaring_and_exporting_a_module_is_not_an_arrow_but_using_it_is() {
        let exported = [
            ("src/lib.rs", "pub mod a;\npub use a::{A, B};\npub struct Own;\n"),
            ("src/a.rs", "pub struct A;\npub struct B(crate::Own);\n"),
        ];
        assert_eq!(found(&exported), ["a.rs lib.rs"]);
        let used =
            [("src/main.rs", "mod a;\nfn main() { a::run() }\n"), ("src/a.rs", "fn run(){}")];
        assert_eq!(found(&used), ["main.rs a.rs"]);
    }

    #[test]
    fn a_module_imported_by_name_counts_where_something_of_it_is_named() {
        let files = [
            ("src/lib.rs", "mod a;\nmod b;\n"),
            ("src/a.rs", "use crate::b;\nfn f() { b::run() }\nfn g() { std::b::no() }\n"),
            ("src/b.rs", "use crate::a;\npub fn run() {}\n"),
        ];
        assert_eq!(found(&files), ["a.rs b.rs"]);
    }

    #[test]
    fn tests_comments_and_modules_inside_of_files_make_no_arrows() {
        let files = [
            ("src/lib.rs", "mod a;\n#[cfg(test)]\npub(crate) mod testing;\nstruct Own;\n"),
            (
                "src/a.rs",
                "// crate::Own\nmod part { use super::f; }\n#[cfg(test)]\nmod tests { use crate::Own; }\n",
            ),
            ("src/testing.rs", "use crate::a::X;\n"),
        ];
        assert_eq!(found(&files), Vec::<String>::new());
    }
}
