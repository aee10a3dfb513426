//! Text that streams to a terminal, wrapped between words.
//!
//! A word is shown when it is complete, so that it is never broken; the terminal wraps words longer than a line. Code
//! (between fences, or indented by four blanks) and table rows stay as they are.
use unicode_segmentation::UnicodeSegmentation;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

pub struct Wrap {
    /// Columns of the terminal.
    width: usize,
    /// Columns used in this line of the terminal.
    column: usize,
    /// Blanks after the last word.
    gap: String,
    /// The part of a word that has come so far.
    word: String,
    /// The word is one wide character, with the combining characters that belong to it.
    wide: bool,
    /// The word is longer than a line, and its beginning was shown already.
    overlong: bool,
    /// The current line of the text: its beginning tells whether it is code or a table.
    line: String,
    fenced: bool,
}

impl Wrap {
    /// Starts at the beginning of a line.
    pub fn new(width: usize) -> Wrap {
        let (gap, word, line) = (String::new(), String::new(), String::new());
        Wrap { width: width.max(1), column: 0, gap, word, wide: false, overlong: false, line, fenced: false }
    }

    /// Takes a piece of text; returns what can be shown.
    pub fn push(&mut self, text: &str) -> String {
        let mut out = String::new();
        for c in text.chars() {
            if c == '\n' {
                self.end_word(&mut out);
                out.push(c);
                (self.column, self.overlong) = (0, false);
                self.fenced ^= is_fence(&self.line) && !closes_itself(&self.line);
                self.line.clear();
                continue;
            }
            self.line.push(c);
            if self.fenced || is_fence(&self.line) || is_code(&self.line) {
                self.end_word(&mut out);
                out.push(c);
                self.column += width(c);
            } else if c == ' ' || c == '\t' {
                self.place_word(&mut out);
                self.gap.push(c);
                self.overlong = false;
            } else if self.overlong {
                out.push(c);
                self.column = self.column % self.width + width(c);
            } else if joins(&self.word, c) {
                self.word.push(c);
            } else if self.wide || width(c) > 1 {
                // Scripts without blanks may be broken between any two characters.
                self.place_word(&mut out);
                self.word.push(c);
                self.wide = width(c) > 1;
            } else {
                self.word.push(c);
                if columns(&self.word) > self.width {
                    self.place_word(&mut out);
                    self.column = (self.column - 1) % self.width + 1;
                    self.overlong = true;
                }
            }
        }
        out
    }

    /// Returns the rest, after the last piece of text.
    pub fn end(&mut self) -> String {
        let mut out = String::new();
        self.end_word(&mut out);
        out
    }

    /// Puts the word on this line, or on the next one if it does not fit.
    fn place_word(&mut self, out: &mut String) {
        if self.word.is_empty() {
            return;
        }
        let (gap, word) = (columns(&self.gap), columns(&self.word));
        if self.column > 0 && self.column + gap + word > self.width {
            out.push('\n');
            self.column = 0;
        } else {
            out.push_str(&self.gap);
            self.column += gap;
        }
        out.push_str(&self.word);
        self.column += word;
        self.gap.clear();
        self.word.clear();
        self.wide = false;
    }

    /// Puts the word and the blanks after it.
    fn end_word(&mut self, out: &mut String) {
        self.place_word(out);
        out.push_str(&self.gap);
        self.column += columns(&self.gap);
        self.gap.clear();
    }
}

fn is_fence(line: &str) -> bool {
    let line = line.trim_start_matches(' ');
    line.starts_with("```") || line.starts_with("~~~")
}

/// Inline code at the start of a line ("```x```") and not a fence. After a fence of tildes a backtick is only part of a
/// word.
fn closes_itself(line: &str) -> bool {
    let line = line.trim_start_matches(' ');
    line.starts_with('`') && line.trim_start_matches('`').contains('`')
}

/// True if `c` belongs to the word's last grapheme cluster, e.g. the parts of an emoji.
fn joins(word: &str, c: char) -> bool {
    let joined =
        || format!("{word}{c}").graphemes(true).next_back().is_some_and(|last| last.len() > c.len_utf8());
    !c.is_ascii() && !word.is_empty() && joined()
}

fn is_code(line: &str) -> bool {
    line.starts_with("    ") || line.starts_with('\t') || line.starts_with('|')
}

fn columns(text: &str) -> usize {
    text.width()
}

/// Columns of `c`. A tab counts as one column: only the terminal knows where it ends.
fn width(c: char) -> usize {
    if c == '\t' { 1 } else { c.width().unwrap_or(0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Wraps `text` whole and cut into pieces; the result must be the same.
    fn wrapped(width: usize, text: &str) -> String {
        let whole = |pieces: &mut dyn Iterator<Item = String>| {
            let mut wrap = Wrap::new(width);
            let shown: String = pieces.map(|piece| wrap.push(&piece)).collect();
            shown + &wrap.end()
        };
        let at_once = whole(&mut std::iter::once(text.to_string()));
        assert_eq!(whole(&mut text.chars().map(String::from)), at_once, "{text:?}");
        at_once
    }

    #[test]
    fn lines_break_between_words() {
        assert_eq!(wrapped(10, "one two three four"), "one two\nthree four");
        assert_eq!(wrapped(10, "one two  three"), "one two\nthree");
        assert_eq!(wrapped(7, "one two"), "one two");
        assert_eq!(wrapped(10, "a\n\n  - b c\n"), "a\n\n  - b c\n", "what fits stays as it is");
        assert_eq!(wrapped(4, "a "), "a ");
        assert_eq!(wrapped(80, ""), "");
    }

    #[test]
    fn words_that_are_longer_than_a_line_are_whole() {
        assert_eq!(wrapped(5, "a abcdefghij b"), "a\nabcdefghij\nb");
        assert_eq!(wrapped(1, "ab c"), "ab\nc");
    }

    #[test]
    fn characters_have_widths() {
        assert_eq!(wrapped(6, "äöü äöü"), "äöü\näöü");
        assert_eq!(wrapped(5, "所有权系统"), "所有\n权系\n统", "two columns each");
        assert_eq!(wrapped(5, "所有ab 权"), "所有\nab 权");
    }

    /// Regression: grapheme clusters of several characters were broken.
    #[test]
    fn an_emoji_is_one_character() {
        for emoji in ["👩\u{200d}💻", "❤\u{fe0f}\u{200d}🔥", "👍🏽", "🇩🇪", "❤\u{fe0f}"] {
            assert_eq!(
                wrapped(5, &format!("abc {emoji}")),
                format!("abc\n{emoji}"),
                "{emoji:?}: two columns"
            );
            assert_eq!(wrapped(6, &format!("abc {emoji}")), format!("abc {emoji}"));
            assert_eq!(wrapped(3, &format!("所{emoji}")), format!("所\n{emoji}"));
        }
        assert_eq!(wrapped(4, "👩\u{200d}💻👍🏽👍🏽"), "👩\u{200d}💻👍🏽\n👍🏽");
    }

    #[test]
    fn code_stays_as_it_is() {
        let code = "```rust\nlet a = vec![1, 2, 3];\n```\n";
        assert_eq!(wrapped(10, code), code);
        assert_eq!(wrapped(10, "    let a = vec![1];\n"), "    let a = vec![1];\n");
        assert_eq!(wrapped(10, "| a | b | c | d |\n"), "| a | b | c | d |\n");
        // Regression: a fence that opens and closes in one line left all following lines unwrapped.
        assert_eq!(wrapped(10, "```x```\none two three"), "```x```\none two\nthree");
        let tildes = "~~~ `sh` x\necho one two three four\n~~~\n";
        assert_eq!(wrapped(10, &format!("{tildes}one two three")), format!("{tildes}one two\nthree"));
        let behind = format!("{code}one two three");
        assert_eq!(wrapped(10, &behind), format!("{code}one two\nthree"));
    }

    /// A word is shown as soon as a blank follows it, not only at the end of the line.
    #[test]
    fn words_are_shown_as_they_come() {
        let mut wrap = Wrap::new(80);
        assert_eq!(wrap.push("one tw"), "one");
        assert_eq!(wrap.push("o "), " two");
        assert_eq!(wrap.end(), " ");
    }
}
