//! A program's functions, and where they are.

use anyhow::{Context, Result};
use object::{Object, ObjectSegment, ObjectSymbol, SymbolKind};
use std::fs;
use std::path::Path;

pub(super) struct Program {
    /// Where its code begins.
    pub(super) code: u64,
    /// Where each begins, how long it is, and its name; in rising order.
    pub(super) functions: Vec<(u64, u64, String)>,
}

impl Program {
    /// # Errors
    /// If it cannot be read, or is none.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let bytes = fs::read(path)?;
        let file = object::File::parse(&*bytes)?;
        let code = file.segments().find(|segment| segment.permissions().executable());
        let code = code.context("a program without code")?.address();
        let symbols = file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text);
        let mut functions = Vec::new();
        for symbol in symbols.filter(|symbol| symbol.size() > 0) {
            functions.push((symbol.address(), symbol.size(), symbol.name()?.to_owned()));
        }
        functions.sort_unstable();
        Ok(Self { code, functions })
    }

    /// The functions with the byte at `at`: several if the compiler found them to be alike, of
    /// which any may have given its name to the place.
    pub(super) fn functions_at(&self, at: u64) -> impl Iterator<Item = &str> {
        let after = self.functions.partition_point(|(start, ..)| *start <= at);
        let last = self.functions[..after].last().map(|(start, ..)| *start);
        let alike = self.functions[..after].iter().rev();
        let alike = alike.take_while(move |(start, ..)| Some(*start) == last);
        alike.filter(move |(start, len, _)| at - start < *len).map(|(.., name)| name.as_str())
    }
}
