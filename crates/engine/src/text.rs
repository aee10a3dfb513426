//! Stop strings, found across pieces and never shown in part.

/// Looks for stop strings in a text that comes in pieces. What could be the beginning of one is held back.
///
/// Every byte is looked at once per stop string, however long strings and text are (Knuth, Morris and Pratt, 1977).
#[derive(Clone, Debug, Default)]
pub struct StopMatcher {
    stops: Vec<Stop>,
    /// The longest end of the text so far that begins a stop string.
    held: String,
}

#[derive(Clone, Debug)]
struct Stop {
    text: String,
    /// Of each beginning of the text, the length of its longest proper end that is a beginning too. `[len]`
    border: Vec<usize>,
    /// How much of it the text so far ends with.
    matched: usize,
}

impl Stop {
    fn new(text: &str) -> Self {
        let mut stop = Stop { text: text.into(), border: vec![0], matched: 0 };
        for &byte in &text.as_bytes()[1..] {
            stop.step(byte);
            stop.border.push(stop.matched);
        }
        stop.matched = 0;
        stop
    }

    /// One byte more of the text. Uses no border that is longer than what is matched.
    fn step(&mut self, byte: u8) {
        let text = self.text.as_bytes();
        while self.matched == text.len() || (self.matched > 0 && text[self.matched] != byte) {
            self.matched = self.border[self.matched - 1];
        }
        self.matched += usize::from(text[self.matched] == byte);
    }

    fn is_complete(&self) -> bool {
        self.matched == self.text.len()
    }
}

impl StopMatcher {
    /// Empty strings stop nothing.
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|s| !s.is_empty()).map(|s| Stop::new(s)).collect();
        StopMatcher { stops, held: String::new() }
    }

    /// Take a piece; append to `out` what is certain not to belong to a stop string. If one is complete, `out`
    /// ends just before it, and it is returned: of several the one that was complete first, so that the text does
    /// not depend on how it was cut into pieces; of those the longest.
    pub fn push(&mut self, piece: &str, out: &mut String) -> Option<String> {
        for (i, &byte) in piece.as_bytes().iter().enumerate() {
            self.stops.iter_mut().for_each(|stop| stop.step(byte));
            let complete = self.stops.iter().filter(|stop| stop.is_complete());
            if let Some(stop) = complete.max_by_key(|stop| stop.text.len()) {
                let found = stop.text.clone();
                // A stop string begins and ends with whole characters, and so does what stands before it.
                self.held.push_str(&piece[..=i]);
                out.push_str(&self.held[..self.held.len() - found.len()]);
                self.forget();
                return Some(found);
            }
        }
        self.held.push_str(piece);
        let begun = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let sure = self.held.len() - begun;
        out.push_str(&self.held[..sure]);
        self.held.drain(..sure);
        None
    }

    /// The text is over: what was held back belongs to it.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.forget();
    }

    fn forget(&mut self) {
        self.held.clear();
        self.stops.iter_mut().for_each(|stop| stop.matched = 0);
    }
}

#[cfg(test)]
mod tests {
    use super::StopMatcher;

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

    /// The same by looking everywhere.
    fn twin(stops: &[&str], text: &str) -> (String, Option<String>) {
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
    fn any_cut_is_found_as_the_twin_finds_it() {
        let mut numbers = kvist_cache::twin::SplitMix64(7);
        let mut n = |below: u64| (numbers.next() % below) as usize;
        let letters = ["a", "b", "é", "a"];
        let mut found = 0;
        for _ in 0..20_000 {
            let mut word = |most: u64| (0..n(most)).map(|_| letters[n(4)]).collect::<String>();
            let stops: Vec<String> = (0..3).map(|_| word(6)).collect();
            let pieces: Vec<String> = (0..6).map(|_| word(5)).collect();
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let expected = twin(&stops, &pieces.concat());
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            assert_eq!(run(&stops, &pieces), expected, "{stops:?} in {pieces:?}");
            found += usize::from(expected.1.is_some());
        }
        assert!((5_000..18_000).contains(&found), "{found} of 20,000 were stopped");
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
