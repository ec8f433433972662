//! Rust source without its comments and literals, so that braces and words can be counted.

/// `text` with the content of comments, strings and characters replaced by spaces, line by line as
/// before.
pub(super) fn code_only(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let end = match &bytes[at..] {
            [b'/', b'/', ..] => line_comment(bytes, at),
            [b'/', b'*', ..] => block_comment(bytes, at),
            [b'"', ..] => string(bytes, at),
            [b'r', b'"' | b'#', ..] if !follows_name(bytes, at) => raw_string(bytes, at),
            [b'\'', ..] => character(bytes, at),
            _ => at,
        };
        if end == at {
            out.push(bytes[at]);
            at += 1;
        } else {
            out.extend(bytes[at..end].iter().map(|b| if *b == b'\n' { b'\n' } else { b' ' }));
            at = end;
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

fn follows_name(bytes: &[u8], at: usize) -> bool {
    // `br"..."` is a raw string too.
    at > 0
        && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_')
        && bytes[at - 1] != b'b'
}

fn line_comment(bytes: &[u8], at: usize) -> usize {
    bytes[at..].iter().position(|b| *b == b'\n').map_or(bytes.len(), |len| at + len)
}

fn block_comment(bytes: &[u8], start: usize) -> usize {
    let (mut at, mut depth) = (start, 0);
    while at < bytes.len() {
        match &bytes[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at.min(bytes.len())
}

fn string(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while at < bytes.len() && bytes[at] != b'"' {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(bytes.len())
}

fn raw_string(bytes: &[u8], start: usize) -> usize {
    let hashes = bytes[start + 1..].iter().take_while(|b| **b == b'#').count();
    if bytes.get(start + 1 + hashes) != Some(&b'"') {
        return start; // A raw identifier.
    }
    let end: Vec<u8> = std::iter::once(b'"').chain(std::iter::repeat_n(b'#', hashes)).collect();
    let content = start + 2 + hashes;
    let len = bytes[content..].windows(end.len()).position(|window| window == end);
    len.map_or(bytes.len(), |len| content + len + end.len())
}

/// A character, but not a lifetime.
fn character(bytes: &[u8], start: usize) -> usize {
    match &bytes[start + 1..] {
        [b'\\', ..] => {
            let rest = bytes[start + 3..].iter().position(|b| *b == b'\'');
            rest.map_or(start, |len| start + 3 + len + 1)
        }
        [first, rest @ ..] => {
            // One character of up to four bytes, then the quote.
            let width = (0..4).find(|width| rest.get(*width) == Some(&b'\''));
            match width {
                Some(width) if width == 0 || !first.is_ascii() => start + width + 3,
                _ => start,
            }
        }
        [] => start,
    }
}

/// A function and how long it is.
pub(super) struct Function {
    /// What it is called.
    pub(super) name: String,
    /// The line it starts on, from 1.
    pub(super) line: usize,
    /// Its lines, from the signature to the last brace.
    pub(super) lines: usize,
}

/// The functions in `code`, which [`code_only`] made.
pub(super) fn functions(code: &str) -> Vec<Function> {
    let mut found = Vec::new();
    let lines: Vec<&str> = code.lines().collect();
    for (index, line) in lines.iter().enumerate() {
        let Some(name) = function_name(line) else { continue };
        if let Some(len) = block_lines(&lines[index..]) {
            found.push(Function { name: name.to_owned(), line: index + 1, lines: len });
        }
    }
    found
}

fn function_name(line: &str) -> Option<&str> {
    let (before, after) = line.split_once("fn ")?;
    let words = ["pub", "const", "async", "unsafe", "extern"];
    let modifier =
        |word: &str| words.iter().any(|known| word.starts_with(known)) || word.ends_with(')');
    if !before.split_whitespace().all(modifier) {
        return None;
    }
    let end = after.find(|c: char| !(c.is_alphanumeric() || c == '_'))?;
    (end > 0).then(|| &after[..end])
}

/// Lines from the first one to the brace that closes the first one opened; `None` where a semicolon
/// comes first.
pub(super) fn block_lines(lines: &[&str]) -> Option<usize> {
    let (mut depth, mut brackets) = (0_usize, 0_usize);
    for (index, line) in lines.iter().enumerate() {
        for letter in line.chars() {
            match letter {
                '(' | '[' => brackets += 1,
                ')' | ']' => brackets = brackets.saturating_sub(1),
                '{' => depth += 1,
                '}' => {
                    depth = depth.saturating_sub(1);
                    if depth == 0 {
                        return Some(index + 1);
                    }
                }
                ';' if depth == 0 && brackets == 0 => return None,
                _ => {}
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_blanked_and_lines_stay() {
        let text = "let a = \"}\\\"}\"; // }\nlet b = '}'; /* }\n} */ fn c<'a>(x: &'a str) {}\n";
        let code = code_only(text);
        assert_eq!(code.lines().count(), text.lines().count());
        assert_eq!(code.matches('}').count(), 1);
        assert!(code.contains("fn c<'a>(x: &'a str) {}"));
        assert!(!code_only("let s = r#\"fn x() { \" }\"#;").contains("fn"));
        assert!(!code_only("let s = br\"{\";").contains('{'));
        assert_eq!(code_only("let c = 'é'; let d = '\\u{7d}';").matches('}').count(), 0);
    }

    #[test]
    fn a_function_is_measured_from_its_signature_to_its_brace() {
        let code =
            "pub(crate) async fn long(\n    a: [u8; 3],\n) {\n    if a {\n    }\n}\nfn none();\n";
        let found = functions(code);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].name.as_str(), found[0].line, found[0].lines), ("long", 1, 6));
    }
}
