//! Matches stop strings across pieces of text and never shows part of one.

use std::sync::Arc;

/// Precomputed stop strings. Build them once and share them between texts.
#[derive(Clone, Debug, Default)]
pub struct Stops(Vec<Stop>);

#[derive(Clone, Debug)]
struct Stop {
    text: String,
    /// KMP failure table: for each prefix of the text, the length of its longest proper suffix that is also a prefix.
    /// `[len]`
    border: Vec<u32>,
}

impl Stops {
    /// Ignores empty strings and strings of 4 GiB or more.
    pub fn new(stops: &[String]) -> Self {
        let counted = stops.iter().filter(|s| !s.is_empty() && u32::try_from(s.len()).is_ok());
        Stops(counted.map(|s| Stop::new(s)).collect())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Stop {
    fn new(text: &str) -> Self {
        let mut stop = Stop { text: text.into(), border: vec![0] };
        let mut matched = 0;
        for &byte in &text.as_bytes()[1..] {
            matched = stop.step(matched, byte);
            stop.border.push(matched as u32);
        }
        stop
    }

    /// One KMP step: the length of the stop-string prefix that the text ends with after `byte`, given that it ended
    /// with `matched` bytes of it before. Uses no border longer than `matched`.
    fn step(&self, mut matched: usize, byte: u8) -> usize {
        let text = self.text.as_bytes();
        while matched == text.len() || (matched > 0 && text[matched] != byte) {
            matched = self.border[matched - 1] as usize;
        }
        matched + usize::from(text[matched] == byte)
    }
}

/// Looks for stop strings in a text that arrives in pieces. Holds back text that may be the beginning of a stop string.
///
/// Looks at every byte once per stop string, whatever their lengths (Knuth, Morris and Pratt, 1977).
#[derive(Clone, Debug, Default)]
pub struct StopMatcher {
    stops: Arc<Stops>,
    /// For each stop string: the length of its prefix that the text so far ends with.
    matched: Vec<usize>,
    /// The longest suffix of the text so far that begins a stop string.
    pending: String,
}

impl StopMatcher {
    /// Ignores empty strings.
    pub fn new(stops: &[String]) -> Self {
        Self::of(Arc::new(Stops::new(stops)))
    }

    /// A matcher over shared stop strings, for one of several texts.
    pub fn of(stops: Arc<Stops>) -> Self {
        StopMatcher { matched: vec![0; stops.0.len()], stops, pending: String::new() }
    }

    /// Adds a piece and appends to `out` all text that cannot be part of a stop string. If a stop string is complete,
    /// `out` ends just before it and the string is returned. Among several, the one completed first is chosen, so that
    /// the result does not depend on how the text was cut into pieces; among those completed at the same byte, the
    /// longest.
    pub fn push(&mut self, piece: &str, out: &mut String) -> Option<String> {
        for (i, &byte) in piece.as_bytes().iter().enumerate() {
            let each = self.stops.0.iter().zip(&mut self.matched);
            each.for_each(|(stop, matched)| *matched = stop.step(*matched, byte));
            let complete = self.stops.0.iter().zip(&self.matched).filter(|(stop, n)| stop.text.len() == **n);
            if let Some((stop, _)) = complete.max_by_key(|(stop, _)| stop.text.len()) {
                let found = stop.text.clone();
                // Stop strings start and end at character boundaries, and so does the text before one.
                self.pending.push_str(&piece[..=i]);
                out.push_str(&self.pending[..self.pending.len() - found.len()]);
                self.forget();
                return Some(found);
            }
        }
        self.pending.push_str(piece);
        let begun = self.matched.iter().copied().max().unwrap_or(0);
        let sure = self.pending.len() - begun;
        out.push_str(&self.pending[..sure]);
        self.pending.drain(..sure);
        None
    }

    /// The text has ended: appends the pending text to `out`.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.pending);
        self.forget();
    }

    fn forget(&mut self) {
        self.pending.clear();
        self.matched.fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::{StopMatcher, Stops};
    use std::sync::Arc;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<String>) {
        let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
        let (mut matcher, mut out) = (StopMatcher::new(&stops), String::new());
        for piece in pieces {
            if let Some(stop) = matcher.push(piece, &mut out) {
                return (out, Some(stop));
            }
        }
        matcher.finish(&mut out);
        (out, None)
    }

    /// Reference implementation: searches at every position.
    fn reference(stops: &[&str], text: &str) -> (String, Option<String>) {
        let ends = (1..=text.len()).filter(|end| text.is_char_boundary(*end));
        for end in ends {
            let found = stops.iter().filter(|stop| !stop.is_empty() && text[..end].ends_with(**stop));
            if let Some(stop) = found.max_by_key(|stop| stop.len()) {
                return (text[..end - stop.len()].into(), Some(stop.to_string()));
            }
        }
        (text.into(), None)
    }

    #[test]
    fn every_cut_matches_the_reference() {
        let mut numbers = kvist_testing::reference::SplitMix64(7);
        let mut n = |below: u64| (numbers.next() % below) as usize;
        let letters = ["a", "b", "é", "a"];
        let mut found = 0;
        for _ in 0..20_000 {
            let mut word = |max: u64| (0..n(max)).map(|_| letters[n(4)]).collect::<String>();
            let stops: Vec<String> = (0..3).map(|_| word(6)).collect();
            let pieces: Vec<String> = (0..6).map(|_| word(5)).collect();
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let expected = reference(&stops, &pieces.concat());
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            assert_eq!(run(&stops, &pieces), expected, "{stops:?} in {pieces:?}");
            found += usize::from(expected.1.is_some());
        }
        assert!((5_000..18_000).contains(&found), "{found} of 20,000 were stopped");
    }

    /// The answers of a request share the stop strings, but each has its own match state.
    #[test]
    fn texts_share_strings_and_nothing_else() {
        let stops = Arc::new(Stops::new(&["ab".to_string(), String::new()]));
        let mut matchers = vec![StopMatcher::of(stops.clone()); 2];
        assert_eq!(Arc::strong_count(&stops), 3);
        let (mut out, mut other) = (String::new(), String::new());
        assert_eq!(matchers[0].push("xa", &mut out), None);
        assert_eq!(matchers[1].push("b", &mut other), None);
        assert_eq!(matchers[0].push("b", &mut out), Some("ab".to_string()));
        assert_eq!((out.as_str(), other.as_str()), ("x", "b"));
    }

    #[test]
    fn stops_across_pieces() {
        let stop = |s: &str| Some(s.to_string());
        type Row = (&'static [&'static str], &'static [&'static str], &'static str, Option<String>);
        let table: [Row; 9] = [
            (&[], &["abc"], "abc", None),
            (&["b"], &["abc"], "a", stop("b")),
            (&["END"], &["so E", "N", "D more"], "so ", stop("END")),
            (&["END"], &["so E", "N", "OUGH"], "so ENOUGH", None),
            (&["aab"], &["a", "a", "a", "b"], "a", stop("aab")),
            (&["é!"], &["caf", "é", "!"], "caf", stop("é!")),
            (&["xy", "xyz"], &["1xyz"], "1", stop("xy")),
            (&["abcd", "bc"], &["abcd"], "a", stop("bc")),
            (&["abcd", "bc"], &["a", "b", "cd"], "a", stop("bc")),
        ];
        for (stops, pieces, text, found) in table {
            assert_eq!(run(stops, pieces), (text.to_string(), found), "{stops:?} in {pieces:?}");
        }
    }
}
