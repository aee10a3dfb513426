//! An answer, shown while it is generated.
use super::wrap::Wrap;
use crate::{interrupt, output};
use kvist_engine::generate::Observer;
use std::io::IsTerminal;

/// Columns of the terminal on stdout; `None` elsewhere.
fn terminal_width() -> Option<usize> {
    if !std::io::stdout().is_terminal() {
        return None;
    }
    console::Term::stdout().size_checked().map(|(_, columns)| usize::from(columns)).filter(|n| *n > 0)
}

/// Where the answer is shown.
pub struct Screen {
    streams: bool,
    /// `Some` at a terminal.
    wrap: Option<Wrap>,
    /// The last text shown was reasoning.
    thinks: bool,
    /// Some text was shown.
    began: bool,
    failed: Option<anyhow::Error>,
}

impl Screen {
    /// On stdout. Without `streams`, nothing is shown.
    pub fn new(streams: bool) -> Self {
        Screen { streams, wrap: terminal_width().map(Wrap::new), thinks: false, began: false, failed: None }
    }

    fn show(&mut self, text: &str) {
        if !self.streams {
            return;
        }
        let shown = if self.thinks { output::show_dimmed(text) } else { output::show(text) };
        if let Err(error) = shown {
            self.failed = Some(error);
        }
    }

    /// Shows the text that is still buffered.
    fn flush(&mut self) {
        if let Some(rest) = self.wrap.as_mut().map(Wrap::end) {
            self.show(&rest);
        }
    }

    /// Ends the answer.
    ///
    /// # Errors
    /// Stdout could not be written.
    pub fn end(mut self) -> anyhow::Result<()> {
        self.flush();
        self.failed.map_or(Ok(()), Err)
    }

    /// Switches between reasoning and answer.
    fn switch(&mut self, thinks: bool) {
        if self.thinks == thinks {
            return;
        }
        self.flush();
        self.thinks = thinks;
        if let Some(wrap) = self.wrap.as_mut().filter(|_| self.began) {
            let space = wrap.push("\n\n");
            self.show(&space);
        }
    }
}

impl Observer for Screen {
    fn prefilled(&mut self, _: usize) -> bool {
        !interrupt::interrupted()
    }
    fn sampled(&mut self) -> bool {
        !interrupt::interrupted()
    }
    /// Shown only at a terminal: a program that reads stdout gets the answer alone.
    fn reasoning(&mut self, text: &str) -> bool {
        if self.wrap.is_some() {
            self.switch(true);
            self.began = true;
            let text = output::harmless(text);
            let text = self.wrap.as_mut().map(|wrap| wrap.push(&text)).unwrap_or_default();
            self.show(&text);
        }
        self.failed.is_none()
    }
    fn text(&mut self, text: &str) -> bool {
        self.switch(false);
        self.began = true;
        // Mark control characters before wrapping, because the marks take columns.
        let text = output::harmless(text);
        match &mut self.wrap {
            Some(wrap) => {
                let text = wrap.push(&text);
                self.show(&text);
            }
            None => self.show(&text),
        }
        self.failed.is_none()
    }
}
