//! Writing to stdout, and formatting errors.
use anyhow::Context;
use std::borrow::Cow;
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

/// Writes to stdout and flushes; at a terminal [`harmless`].
pub fn show(text: &str) -> anyhow::Result<()> {
    write_out(&harmless(text))
}

/// As [`show`], but dimmed if the terminal supports colours and they are not turned off.
pub fn show_dimmed(text: &str) -> anyhow::Result<()> {
    if text.is_empty() || !console::colors_enabled() {
        return show(text);
    }
    write_out(&console::style(harmless(text)).dim().to_string())
}

fn write_out(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    Ok(out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(StdoutFailed)?)
}

/// stdout cannot be written. A type of its own: files and sockets can be closed pipes too, and those are failures.
#[derive(Debug)]
struct StdoutFailed(io::Error);

impl fmt::Display for StdoutFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("cannot write to stdout")
    }
}

impl std::error::Error for StdoutFailed {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

/// The text to write to stdout. At a terminal control characters are replaced by visible marks: otherwise a model's
/// output, or strings from a model file (its name, tensor names), could move the cursor, set the clipboard, or make the
/// terminal type something. In a pipe or a file the text is unchanged.
pub fn harmless(text: &str) -> Cow<'_, str> {
    match io::stdout().is_terminal() {
        true => marked(text),
        false => Cow::Borrowed(text),
    }
}

/// Marks control characters as `less` does: `^[` for ESC, `<U+009B>` for those beyond ASCII. Line breaks and tabs stay.
/// Each character is handled by itself, so the result does not depend on where a stream is cut.
fn marked(text: &str) -> Cow<'_, str> {
    let drives = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(drives) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        match c {
            c if !drives(c) => out.push(c),
            '\0'..='\x7f' => out.extend(['^', char::from(c as u8 ^ 0x40)]),
            c => out += &format!("<U+{:04X}>", u32::from(c)),
        }
    }
    Cow::Owned(out)
}

/// Writes a line to stderr, with marks as [`harmless`] makes them. A failed write is ignored: it does not affect the
/// work.
pub fn note(text: &str) {
    ask(&format!("{text}\n"));
}

/// As [`note`], without a line break: a prompt.
pub fn ask(text: &str) {
    let text = match io::stderr().is_terminal() {
        true => marked(text),
        false => Cow::Borrowed(text),
    };
    let mut err = io::stderr().lock();
    let _ = err.write_all(text.as_bytes()).and_then(|()| err.flush());
}

/// Writes one JSON document and a newline to stdout.
pub fn show_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    show(&(serde_json::to_string_pretty(value)? + "\n"))
}

/// Writes one JSON document on a line of its own to stdout.
pub fn show_json_line(value: &impl serde::Serialize) -> anyhow::Result<()> {
    show(&(serde_json::to_string(value)? + "\n"))
}

/// True if the error is a closed stdout pipe.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let closed = |failed: &StdoutFailed| failed.0.kind() == io::ErrorKind::BrokenPipe;
    error.chain().any(|e| e.downcast_ref().is_some_and(closed))
}

/// An error and its causes in one line, without repetition.
pub fn sentence(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            if !text.is_empty() {
                text += ": ";
            }
            text += &cause;
        }
    }
    text
}

/// Writes a file atomically: to a temporary file in the same folder, which is then renamed. A pipe or a device is
/// written in place.
pub fn write_file(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let mut file = FileInParts::create(path)?;
    file.write(bytes)?;
    file.finish()
}

/// [`write_file`] for data that comes in parts. If it is dropped before `finish`, it leaves no file behind.
pub struct FileInParts {
    path: PathBuf,
    place: PathBuf,
    file: io::BufWriter<std::fs::File>,
    whole: bool,
}

impl FileInParts {
    pub fn create(path: &Path) -> anyhow::Result<Self> {
        let place = if path.metadata().is_ok_and(|m| !m.is_file()) {
            path.to_path_buf()
        } else {
            temporary_path(path)?
        };
        let file = std::fs::File::create(&place).with_context(|| cannot_write(path))?;
        Ok(FileInParts { path: path.into(), place, file: io::BufWriter::new(file), whole: false })
    }

    pub fn write(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        self.file.write_all(bytes).with_context(|| cannot_write(&self.path))
    }

    pub fn finish(mut self) -> anyhow::Result<()> {
        let mut written = self.file.flush();
        if self.place != self.path {
            written = written
                .and_then(|()| self.file.get_ref().sync_all())
                .and_then(|()| std::fs::rename(&self.place, &self.path));
        }
        self.whole = written.is_ok();
        written.with_context(|| cannot_write(&self.path))
    }
}

impl Drop for FileInParts {
    fn drop(&mut self) {
        if !self.whole && self.place != self.path {
            let _ = std::fs::remove_file(&self.place); // nowhere to report an error
        }
    }
}

fn cannot_write(path: &Path) -> String {
    format!("cannot write {}", path.display())
}

fn temporary_path(path: &Path) -> anyhow::Result<PathBuf> {
    let name =
        path.file_name().with_context(|| format!("cannot write {}: it names no file", path.display()))?;
    let mut part = name.to_os_string();
    part.push(format!(".{}.part", std::process::id()));
    Ok(path.with_file_name(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Any closed pipe ended the program without a message and with status 0, also that of `--out`.
    #[test]
    fn only_stdout_may_be_closed() {
        let closed = || io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(is_closed_pipe(&anyhow::Error::from(StdoutFailed(closed())).context("while it was shown")));
        assert!(!is_closed_pipe(&anyhow::Error::from(closed()).context("cannot write /tmp/out")));
        assert!(!is_closed_pipe(&StdoutFailed(io::ErrorKind::StorageFull.into()).into()));
    }

    #[test]
    fn control_characters_stand_as_marks() {
        for (text, expected) in [
            ("a\tb\nc é 所", "a\tb\nc é 所"),
            ("\x1b[31mred\x1b[0m", "^[[31mred^[[0m"),
            ("\x1b", "^["),
            ("[2J", "[2J"),
            ("\0\x07\x08\r\n\x7f", "^@^G^H^M\n^?"),
            ("\u{80}\u{9b}31m\u{9f}\u{a0}", "<U+0080><U+009B>31m<U+009F>\u{a0}"),
        ] {
            assert_eq!(marked(text), expected, "{text:?}");
        }
    }
}
