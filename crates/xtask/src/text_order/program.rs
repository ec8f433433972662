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

    /// The function with the byte at `at`.
    pub(super) fn function_at(&self, at: u64) -> Option<&str> {
        let after = self.functions.partition_point(|(start, ..)| *start <= at);
        let (start, len, name) = self.functions.get(after.checked_sub(1)?)?;
        (at - start < *len).then_some(name)
    }
}
