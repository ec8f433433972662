//! What is on the screen: which disks, in which order, and what is said of them.

use super::columns::{Table, shortened, table};
use super::order::{Problem, Sort};
use super::rates::{Rates, between, number, ratio};
use super::screen::{Key, Line, Style};
use super::search::{Search, Use};
use crate::ctl::{disks, duration, text};
use crate::output::human_size;
use crate::plain::plain;
use serde_json::Value;
use std::time::Duration;

/// Lines above the first disk.
const HEAD_LINES: usize = 5;

/// What it shows, and of what.
pub(super) struct View {
    before: Value,
    now: Value,
    sort: Sort,
    search: Search,
    /// How many disks the search found, when it was drawn.
    found: usize,
    /// The number of disks above the first that is shown.
    above: usize,
    /// Rows for disks, when it was drawn.
    page: usize,
    gone: Option<Gone>,
}

/// A server that does not answer.
struct Gone {
    /// Since the last answer.
    since: Duration,
    why: String,
}

/// What to do about a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wish {
    Quit,
    Stay,
}

impl View {
    /// Of a server that has answered once: its averages since its start.
    pub(super) fn new(answer: Value, sort: Sort) -> Self {
        let found = disks(&answer).count();
        let (before, search, gone) = (Value::Null, Search::default(), None);
        Self { before, now: answer, sort, search, found, above: 0, page: 1, gone }
    }

    pub(super) fn answered(&mut self, answer: Value) {
        self.before = std::mem::replace(&mut self.now, answer);
        self.gone = None;
    }

    /// The last answer came so long ago.
    pub(super) fn unanswered(&mut self, since: Duration, why: String) {
        self.gone = Some(Gone { since, why });
    }

    pub(super) fn press(&mut self, key: Key) -> Wish {
        match self.search.press(key) {
            Use::Changed => self.above = 0,
            Use::Taken => {}
            Use::None => return self.press_apart(key),
        }
        Wish::Stay
    }

    /// A key that is none of the search.
    fn press_apart(&mut self, key: Key) -> Wish {
        let count = self.found;
        let above = match key {
            Key::Letter('q' | 'Q') => return Wish::Quit,
            Key::Letter('k') | Key::Up => self.above.saturating_sub(1),
            Key::Letter('j') | Key::Down => self.above + 1,
            Key::Letter('b') | Key::PageUp => self.above.saturating_sub(self.page),
            Key::Letter(' ') | Key::PageDown => self.above + self.page,
            Key::Letter('g') | Key::Home => 0,
            Key::Letter('G') | Key::End => count,
            // What comes first is why one sorts.
            Key::Letter(letter) => match Sort::of_key(letter.to_ascii_lowercase()) {
                Some(sort) => {
                    self.sort = sort;
                    0
                }
                None => self.above,
            },
            Key::Enter | Key::Backspace | Key::Escape => self.above,
        };
        self.above = above.min(count.saturating_sub(self.page));
        Wish::Stay
    }

    /// The screen, of `rows` and `columns`.
    pub(super) fn lines(&mut self, rows: usize, columns: usize) -> Vec<Line> {
        let mut rates = between(&self.before, &self.now);
        let mut lines = self.head(&rates);
        let all = rates.len();
        rates.retain(|rates| self.search.finds(rates));
        self.found = rates.len();
        if self.search.is_on() {
            lines.pop();
            lines.push(Line::new(Style::Bold, self.search.said(rates.len(), all)));
        }
        self.sort.apply(&mut rates);
        // One row says how many are not shown, if any.
        let room = rows.saturating_sub(HEAD_LINES).max(1);
        self.page = if rates.len() > room { room.saturating_sub(1).max(1) } else { room };
        self.above = self.above.min(rates.len().saturating_sub(self.page));
        let shown: Vec<_> = rates.iter().skip(self.above).take(self.page).collect();
        let below = rates.len() - self.above - shown.len();
        let Table { head, total, rows } = table(&rates, &shown, columns);
        lines.push(Line::new(Style::Head, format!("{head:columns$}")));
        lines.push(Line::new(Style::Bold, total));
        let styles = shown.iter().map(|rates| match Problem::of(rates) {
            Problem::Broken => Style::Bad,
            Problem::Errors | Problem::Weakened => Style::Warn,
            Problem::None => Style::Plain,
        });
        lines.extend(styles.zip(rows).map(|(style, row)| Line::new(style, row)));
        if rates.is_empty() && all > 0 {
            lines.push(Line::new(Style::Dim, "no disk has these words".to_owned()));
        }
        if self.above + below > 0 {
            lines.push(Line::new(Style::Dim, not_shown(self.above, below)));
        }
        if self.gone.is_some() {
            // Of what was, nothing is known now.
            lines.iter_mut().skip(2).for_each(|line| line.style = Style::Dim);
        }
        for line in &mut lines {
            line.text = shortened(&line.text, columns);
        }
        lines
    }

    /// Three lines about the whole.
    fn head(&self, rates: &[Rates<'_>]) -> Vec<Line> {
        let (version, host) = (text(&self.now["version"]), text(&self.now["host"]));
        let uptime = duration(number(&self.now["uptime_ms"]) / 1000);
        let first = format!("mica {version} on {host}, up {uptime}, by {}", self.sort.name());
        let second = match &self.gone {
            Some(Gone { since, why }) => {
                let since = duration(since.as_secs());
                Line::new(
                    Style::Bad,
                    format!("NO ANSWER FOR {since}, TRYING AGAIN: {}", plain(why)),
                )
            }
            None => Line::new(Style::Plain, self.process(rates)),
        };
        vec![Line::new(Style::Bold, first), second, Line::new(Style::Dim, KEYS.to_owned())]
    }

    fn process(&self, rates: &[Rates<'_>]) -> String {
        let ill = rates.iter().filter(|rates| Problem::of(rates) > Problem::None).count();
        let process = &self.now["process"];
        let memory = human_size(number(&process["resident_bytes"]));
        let descriptors = text(&process["open_descriptors"]);
        let processor = match self.processor() {
            Some(used) => format!("{:.0}% of a processor", used * 100.0),
            None => "averages since the start".to_owned(),
        };
        format!("{ill} with problems; {memory}, {processor}, {descriptors} descriptors")
    }

    /// How much of a processor it used between the two answers.
    fn processor(&self) -> Option<f64> {
        let [was, is] = [&self.before, &self.now];
        if was["pid"] != is["pid"] {
            return None;
        }
        let used = [was, is].map(|answer| answer["process"]["cpu_seconds"].as_f64());
        let [was_ms, is_ms] = [was, is].map(|answer| number(&answer["uptime_ms"]));
        let passed = ratio(is_ms.checked_sub(was_ms)?, 1000)?;
        (passed > 0.0).then_some(((used[1]? - used[0]?) / passed).max(0.0))
    }
}

const KEYS: &str =
    "q quits, arrows scroll, / finds; by Problems Load Reads Writes Time Errors Name";

fn not_shown(above: usize, below: usize) -> String {
    match (above, below) {
        (0, below) => format!("{below} more"),
        (above, 0) => format!("{above} more above"),
        (above, below) => format!("{below} more, {above} above"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The answer of a server with so many disks; the fifth has failed.
    fn answer(count: usize, uptime_ms: u64) -> Value {
        let disks = (0..count).map(|index| {
            let (state, failure) = match index {
                4 => ("failed", json!("gone")),
                _ => ("serving", Value::Null),
            };
            json!({"name": format!("vm-{index}"), "state": state, "failure": failure,
                   "nbd": {"reads": index * 10}})
        });
        json!({"pid": 7, "version": "1", "host": "here", "uptime_ms": uptime_ms,
               "process": {"cpu_seconds": uptime_ms / 2000, "resident_bytes": 3 << 20},
               "disks": disks.collect::<Vec<_>>()})
    }

    fn texts(view: &mut View, rows: usize) -> Vec<String> {
        view.lines(rows, 80).into_iter().map(|line| line.text).collect()
    }

    #[test]
    fn disks_that_do_not_fit_are_counted_and_scrolled_to() {
        let mut view = View::new(answer(200, 1000), Sort::Name);
        let shown = texts(&mut view, 14);
        assert_eq!(shown.len(), 14);
        assert!(shown[4].starts_with("200 disks"), "{shown:?}");
        assert!(shown[5].starts_with("vm-0 ") && shown[12].starts_with("vm-7 "), "{shown:?}");
        assert_eq!(shown[13], "192 more");
        for key in [Key::Down, Key::PageDown, Key::Letter('j')] {
            assert_eq!(view.press(key), Wish::Stay);
        }
        let shown = texts(&mut view, 14);
        assert!(shown[5].starts_with("vm-10 "), "{shown:?}");
        assert_eq!(shown[13], "182 more, 10 above");
        view.press(Key::End);
        let shown = texts(&mut view, 14);
        assert!(shown[12].starts_with("vm-199 "), "{shown:?}");
        assert_eq!(shown[13], "192 more above");
        view.press(Key::Home);
        view.press(Key::Up);
        assert!(texts(&mut view, 14)[5].starts_with("vm-0 "));
        assert_eq!(view.press(Key::Letter('q')), Wish::Quit);
        // It became fewer, and the terminal larger.
        view.press(Key::End);
        view.answered(answer(3, 2000));
        let shown = texts(&mut view, 14);
        assert_eq!((shown.len(), shown[5].starts_with("vm-0 ")), (8, true), "{shown:?}");
        for rows in 0..9 {
            assert!(!texts(&mut view, rows).is_empty(), "{rows}");
        }
    }

    #[test]
    fn disks_are_searched_for_by_words_until_escape() {
        let mut view = View::new(answer(200, 1000), Sort::Name);
        assert!(texts(&mut view, 24)[2].contains("/ finds"), "the keys are said");
        assert!(KEYS.len() <= 80);
        // While it is typed, letters are letters.
        let type_in = |view: &mut View, typed: &str| {
            for letter in typed.chars() {
                assert_eq!(view.press(Key::Letter(letter)), Wish::Stay);
            }
        };
        view.press(Key::End);
        type_in(&mut view, "/VM-19 servinqq");
        view.press(Key::Backspace);
        view.press(Key::Backspace);
        let shown = texts(&mut view, 24);
        let said = "/VM-19 servin_  11 of 200 disks; Enter: keys sort again, Esc: all disks";
        assert_eq!(shown[2], said);
        assert!(shown[4].starts_with("11 disks") && shown[5].starts_with("vm-19 "), "{shown:?}");
        assert_eq!(shown.len(), 5 + 11);
        assert!(shown[0].ends_with("by name"), "{shown:?}");
        view.press(Key::Enter);
        view.press(Key::Letter('r'));
        let shown = texts(&mut view, 24);
        assert!(shown[0].ends_with("by reads") && shown[5].starts_with("vm-199 "), "{shown:?}");
        assert_eq!(shown[2], "/VM-19 servin  11 of 200 disks; Esc: all disks");
        // A page of what was found is scrolled through.
        texts(&mut view, 10);
        view.press(Key::End);
        assert_eq!(texts(&mut view, 10).last().map(String::as_str), Some("7 more above"));
        view.press(Key::Escape);
        let shown = texts(&mut view, 24);
        assert!(shown[4].starts_with("200 disks") && shown[2] == KEYS, "{shown:?}");
        // What is noted is found, too, and what is not there is said.
        type_in(&mut view, "/gone");
        assert!(texts(&mut view, 24)[5].starts_with("vm-4 "));
        type_in(&mut view, " never");
        assert_eq!(texts(&mut view, 24)[5], "no disk has these words");
        assert_eq!(view.press(Key::Letter('q')), Wish::Stay);
        view.press(Key::Enter);
        assert_eq!(view.press(Key::Letter('q')), Wish::Quit);
    }

    #[test]
    fn problems_come_first_until_another_key_is_pressed() {
        let mut view = View::new(answer(9, 1000), Sort::Problems);
        let lines = view.lines(24, 80);
        assert!(lines[5].text.starts_with("vm-4 ") && lines[5].style == Style::Bad, "{lines:?}");
        assert!(lines[6].text.starts_with("vm-8 "), "{lines:?}");
        assert!(lines[1].text.contains("1 with problems; 3 MiB"), "{lines:?}");
        // Sorting shows what is first then, wherever one was.
        view.lines(8, 80);
        view.press(Key::End);
        view.press(Key::Letter('x'));
        assert!(!view.lines(8, 80)[5].text.starts_with("vm-4 "));
        view.press(Key::Letter('r'));
        let lines = view.lines(24, 80);
        assert!(lines[0].text.ends_with("by reads"), "{lines:?}");
        assert!(lines[5].text.starts_with("vm-8 "), "{lines:?}");
        view.answered(answer(9, 3000));
        assert!(texts(&mut view, 24)[1].contains("50% of a processor"));
    }

    #[test]
    fn server_that_is_gone_is_said_until_it_answers() {
        let mut view = View::new(answer(9, 1000), Sort::Problems);
        view.unanswered(Duration::from_secs(62), "nobody\u{1b} listens".to_owned());
        let lines = view.lines(24, 80);
        assert_eq!(lines[1].text, "NO ANSWER FOR 1 min 2 s, TRYING AGAIN: nobody\u{fffd} listens");
        assert!(lines[2..].iter().all(|line| line.style == Style::Dim), "{lines:?}");
        view.answered(answer(9, 10));
        let lines = view.lines(24, 80);
        assert!(lines.iter().all(|line| !line.text.contains("NO ANSWER")), "{lines:?}");
        assert_eq!(lines[6].style, Style::Plain);
    }
}
