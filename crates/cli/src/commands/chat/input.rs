//! Reads the user's input: with line editing and a history at a terminal; line by line from a pipe, or from a terminal
//! that cannot do that.
//!
//! The history is a file that only the user can read, of at most [`MAX_ENTRIES`] entries. If it cannot be read or
//! written, the chat continues without it and says so once.
use crate::options::utf8;
use crate::{interrupt, output};
use anyhow::Context;
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Behavior, Config, Editor, Helper};
use std::cell::RefCell;
use std::ffi::OsString;
use std::io::{BufRead, IsTerminal};
use std::path::PathBuf;

/// Entries that the history keeps.
const MAX_ENTRIES: usize = 1000;
/// Longest entry that is kept, in bytes; a longer one was pasted.
const MAX_ENTRY_BYTES: usize = 16 << 10;

/// The result of one read.
pub enum Entry {
    Text(String),
    /// No input, and a message was shown if needed: read again.
    Nothing,
    End,
    /// Ctrl-C twice, or a signal: the program should end.
    Interrupted,
}

pub enum Input {
    Terminal(Box<Terminal>),
    /// A pipe, or a terminal without line editing; a terminal gets a prompt (`asks`).
    Plain {
        asks: bool,
    },
}

pub struct Terminal {
    /// `None` once a read was interrupted: the thread that reads has it.
    editor: Option<Editor<Lines, FileHistory>>,
    history: Option<PathBuf>,
    /// The last input was Ctrl-C: a second one ends the chat.
    interrupted: bool,
}

impl Input {
    /// Uses line editing if stdin is a terminal; `keep` saves the history across chats.
    pub fn new(keep: bool) -> anyhow::Result<Input> {
        if !std::io::stdin().is_terminal() {
            return Ok(Input::Plain { asks: false });
        }
        // On such a terminal the editor would write its prompt to stdout.
        if std::env::var("TERM").is_ok_and(|term| cannot_edit(&term)) {
            return Ok(Input::Plain { asks: true });
        }
        let config = Config::builder()
            .max_history_size(MAX_ENTRIES)?
            .history_ignore_dups(true)?
            .history_ignore_space(true)
            // Only text goes to stdout: the prompt goes to the terminal itself.
            .behavior(Behavior::PreferTerm)
            .build();
        let mut editor = Editor::with_config(config).context("cannot edit lines at this terminal")?;
        editor.set_helper(Some(Lines::default()));
        let mut terminal = Terminal { editor: Some(editor), history: None, interrupted: false };
        if keep {
            terminal.remember();
        }
        Ok(Input::Terminal(Box::new(terminal)))
    }

    pub fn is_terminal(&self) -> bool {
        !matches!(self, Input::Plain { asks: false })
    }

    /// True if lines are edited, kept in a history, and continued after a backslash.
    pub fn edits(&self) -> bool {
        matches!(self, Input::Terminal(_))
    }

    pub fn next(&mut self, prompt: &str) -> anyhow::Result<Entry> {
        match self {
            Input::Terminal(terminal) => terminal.next(prompt),
            Input::Plain { asks } => {
                if *asks {
                    output::ask(&format!("\n{prompt}"));
                }
                let read = interrupt::idle(|| {
                    let mut line = Vec::new();
                    std::io::stdin().lock().read_until(b'\n', &mut line).map(|_| line)
                })?;
                let Some(read) = read else { return Ok(Entry::Interrupted) };
                match read.context("cannot read stdin")? {
                    line if line.is_empty() => Ok(Entry::End),
                    line => Ok(Entry::Text(utf8(line, "stdin")?.trim_end_matches(['\n', '\r']).into())),
                }
            }
        }
    }
}

impl Terminal {
    /// Loads the history, and saves new entries from now on.
    fn remember(&mut self) {
        let Some(path) = history_file(|name| std::env::var_os(name)) else { return };
        let folder = path.parent().map(std::fs::create_dir_all).unwrap_or(Ok(()));
        let loaded = folder.map_err(ReadlineError::Io).and_then(|()| match path.exists() {
            true => self.editor.as_mut().map_or(Ok(()), |editor| editor.load_history(&path)),
            false => Ok(()),
        });
        match loaded {
            Ok(()) => self.history = Some(path),
            Err(error) => note_no_history(&path, &error),
        }
    }

    fn next(&mut self, prompt: &str) -> anyhow::Result<Entry> {
        output::ask("\n");
        interrupt::keep_terminal();
        let Some(mut editor) = self.editor.take() else { return Ok(Entry::Interrupted) };
        let prompt = prompt.to_owned();
        let read = interrupt::idle(move || (editor.readline(&prompt), editor))?;
        let Some((read, editor)) = read else { return Ok(Entry::Interrupted) };
        let editor = self.editor.insert(editor);
        let before = std::mem::take(&mut self.interrupted);
        match read {
            Ok(line) => {
                let asked = editor.helper_mut().map(|lines| lines.asked.take()).unwrap_or_default();
                let line = joined(&line, &asked);
                self.keep(&line);
                Ok(Entry::Text(ended(line)))
            }
            Err(ReadlineError::Interrupted) if before => Ok(Entry::Interrupted),
            Err(ReadlineError::Interrupted) => {
                self.interrupted = true;
                output::note("Ctrl-C again, Ctrl-D or /quit ends the chat");
                Ok(Entry::Nothing)
            }
            Err(ReadlineError::Eof) => Ok(Entry::End),
            // The terminal was resized, or the program was suspended and resumed.
            Err(ReadlineError::Signal(_)) => Ok(Entry::Nothing),
            // The line is lost, but the chat continues.
            Err(ReadlineError::Io(error)) if error.kind() == std::io::ErrorKind::InvalidData => {
                output::note("kvist: that was not UTF-8 text: set the terminal to UTF-8");
                Ok(Entry::Nothing)
            }
            Err(error) => Err(error).context("cannot read the terminal"),
        }
    }

    fn keep(&mut self, line: &str) {
        let kept = line.len() <= MAX_ENTRY_BYTES && !line.trim().is_empty();
        let Some(editor) = self.editor.as_mut().filter(|_| kept) else { return };
        if !editor.add_history_entry(line).unwrap_or(false) {
            return;
        }
        if let Some(path) = self.history.take() {
            match editor.append_history(&path) {
                Ok(()) => self.history = Some(path),
                Err(error) => note_no_history(&path, &error),
            }
        }
    }
}

fn note_no_history(path: &std::path::Path, error: &ReadlineError) {
    output::note(&format!("kvist: no history is kept: {}: {error}", path.display()));
}

/// The history's path in the user's state folder, by the XDG base directories; on Windows in local app data.
fn history_file(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let folder = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = match cfg!(windows) {
        true => folder("LOCALAPPDATA"),
        false => folder("XDG_STATE_HOME").or_else(|| Some(folder("HOME")?.join(".local/state"))),
    };
    Some(state?.join("kvist").join("chat-history"))
}

/// True for terminals that the editor cannot drive.
fn cannot_edit(term: &str) -> bool {
    ["dumb", "cons25", "emacs"].iter().any(|name| name.eq_ignore_ascii_case(term))
}

/// True if a single backslash at the end asks for another line. Two backslashes stand for one.
fn continues(typed: &str) -> bool {
    typed.ends_with('\\') && !typed.ends_with("\\\\")
}

/// Removes the backslashes that asked for another line; those of a pasted text stay.
fn joined(typed: &str, asked: &[String]) -> String {
    let lines = typed.split_inclusive('\n').map(|line| match line.strip_suffix("\\\n") {
        Some(start) if asked.iter().any(|a| a.strip_suffix('\\') == Some(start)) => format!("{start}\n"),
        _ => line.to_string(),
    });
    lines.collect()
}

/// Replaces two backslashes at the end by one.
fn ended(mut line: String) -> String {
    if line.ends_with("\\\\") {
        line.pop();
    }
    line
}

/// Input lines, validated by the editor.
#[derive(Default)]
struct Lines {
    /// Lines that ended with a continuing backslash.
    asked: RefCell<Vec<String>>,
}

impl Validator for Lines {
    fn validate(&self, typed: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        let typed = typed.input();
        if !continues(typed) {
            return Ok(ValidationResult::Valid(None));
        }
        self.asked.borrow_mut().extend(typed.rsplit('\n').next().map(str::to_string));
        Ok(ValidationResult::Incomplete)
    }
}
impl Completer for Lines {
    type Candidate = String;
}
impl Hinter for Lines {
    type Hint = String;
}
impl Highlighter for Lines {}
impl Helper for Lines {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(not(windows))]
    fn where_the_history_lies() {
        let with = |set: &[(&str, &str)]| {
            let set: Vec<(String, OsString)> =
                set.iter().map(|(name, value)| (name.to_string(), value.into())).collect();
            history_file(|name| set.iter().find(|(n, _)| n == name).map(|(_, value)| value.clone()))
        };
        let path = |text: &str| Some(PathBuf::from(text));
        assert_eq!(with(&[("HOME", "/home/a")]), path("/home/a/.local/state/kvist/chat-history"));
        assert_eq!(with(&[("HOME", "/home/a"), ("XDG_STATE_HOME", "/s")]), path("/s/kvist/chat-history"));
        // The XDG specification says to ignore relative paths.
        assert_eq!(
            with(&[("HOME", "/home/a"), ("XDG_STATE_HOME", "s")]),
            path("/home/a/.local/state/kvist/chat-history")
        );
        assert_eq!(with(&[]), None);
    }

    #[test]
    fn lines_that_go_on() {
        let asked = ["one\\".to_string(), "two\\".to_string()];
        assert_eq!(joined("one\\\ntwo\\\nthree", &asked), "one\ntwo\nthree");
        // Regression: pasted lines lost their backslashes too.
        assert_eq!(joined("one\\\ncc \\\n -o x", &asked), "one\ncc \\\n -o x");
        assert_eq!(joined("C:\\new", &asked), "C:\\new");
        assert!(continues("one\\") && !continues("one") && !continues("C:\\\\"));
        assert_eq!(ended("C:\\\\".into()), "C:\\", "a line can end in one");
    }
}
