//! Stop strings, found across pieces and never shown in part.

/// Looks for stop strings in a text that comes in pieces. What could be the beginning of one is held back.
#[derive(Clone, Debug, Default)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
}

impl StopMatcher {
    /// Empty strings stop nothing.
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|s| !s.is_empty()).cloned().collect();
        StopMatcher { stops, held: String::new() }
    }

    /// Take a piece; append to `out` what is certain not to belong to a stop string. If one is complete, `out`
    /// ends just before it, and it is returned: of several the one that was complete first, so that the text does
    /// not depend on how it was cut into pieces; of those the longest.
    pub fn push(&mut self, piece: &str, out: &mut String) -> Option<String> {
        self.held.push_str(piece);
        let found = self.stops.iter().filter_map(|stop| Some((self.held.find(stop.as_str())?, stop)));
        if let Some((at, stop)) = found.min_by_key(|(at, stop)| (at + stop.len(), *at)) {
            out.push_str(&self.held[..at]);
            let stop = stop.clone();
            self.held.clear();
            return Some(stop);
        }
        let sure = self.held.len() - self.possible_start();
        out.push_str(&self.held[..sure]);
        self.held.drain(..sure);
        None
    }

    /// The text is over: what was held back belongs to it.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }

    /// Length of the longest end of the held text that begins a stop string.
    fn possible_start(&self) -> usize {
        let starts = self.held.char_indices().map(|(at, _)| &self.held[at..]);
        let begins = |end: &&str| self.stops.iter().any(|stop| stop.starts_with(*end));
        starts.filter(begins).map(str::len).max().unwrap_or(0)
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
