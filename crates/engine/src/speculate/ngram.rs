//! Prompt lookup: the continuation of an earlier occurrence of the last tokens (Saxena, "Prompt Lookup Decoding", 2023).
use super::{DraftRequest, Drafter};
use kvist_model::Error;

/// Proposes what followed the last tokens when they occurred before. It stores nothing: it searches the tokens of the
/// request.
#[derive(Clone, Copy, Debug)]
pub struct Ngram {
    /// Fewest tokens that must agree, at least 1.
    pub min: usize,
    /// More tokens than this are not compared.
    pub max: usize,
}

impl Default for Ngram {
    fn default() -> Self {
        Ngram { min: 2, max: 8 }
    }
}

impl Ngram {
    /// End of the earlier occurrence of the last tokens that agrees longest, and how many tokens agree. Of equally long
    /// ones the newest. O(tokens).
    fn longest_match(&self, tokens: &[u32]) -> Option<(usize, usize)> {
        let (&last, before) = tokens.split_last()?;
        let mut best = None;
        for (i, _) in before.iter().enumerate().rev().filter(|(_, token)| **token == last) {
            let same = before[..i].iter().rev().zip(before.iter().rev()).take(self.max.saturating_sub(1));
            let agreeing = 1 + same.take_while(|(a, b)| a == b).count();
            if agreeing >= self.min && best.is_none_or(|(_, longest)| agreeing > longest) {
                best = Some((i + 1, agreeing));
                if agreeing == self.max {
                    break;
                }
            }
        }
        best
    }
}

impl Drafter for Ngram {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<(), Error> {
        for DraftRequest { tokens, bounds, tree, .. } in requests {
            let Some((end, agreeing)) = self.longest_match(tokens) else { continue };
            let n = bounds.tokens.min(bounds.depth) as usize;
            // The longer the match, the likelier is its continuation; measured acceptance corrects this guess.
            let probability = agreeing as f32 / (agreeing + 1) as f32;
            // A continuation that reaches the end of the text goes on from its own beginning: the text is periodic there.
            let period = tokens.len() - end;
            for i in 0..n {
                let token = tokens[end + i % period];
                tree.push(i.checked_sub(1).map(|parent| parent as u32), token, probability);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Bounds, DraftTree};
    use super::*;

    fn propose(tokens: &[u32], bounds: (u32, u32)) -> Vec<u32> {
        let mut tree = DraftTree::default();
        let bounds = Bounds { tokens: bounds.0, depth: bounds.1, width: 4 };
        let request = DraftRequest { id: 0, salt: "", tokens, bounds, tree: &mut tree };
        Ngram::default().propose(&mut [request]).unwrap();
        assert!(tree.is_chain());
        tree.tokens().to_vec()
    }

    #[test]
    fn continues_the_longest_match() {
        assert_eq!(propose(&[], (4, 4)), [0; 0]);
        assert_eq!(propose(&[1], (4, 4)), [0; 0]);
        assert_eq!(propose(&[1, 2, 9, 2], (4, 4)), [0; 0], "one token is too little");
        assert_eq!(propose(&[1, 2, 9, 8, 1, 2], (2, 4)), [9, 8]);
        // The newest of two equal matches, the longer of two unequal ones.
        assert_eq!(propose(&[1, 2, 9, 1, 2, 8, 5, 1, 2], (1, 1)), [8]);
        assert_eq!(propose(&[7, 1, 2, 9, 1, 2, 8, 7, 1, 2], (1, 4)), [9]);
    }

    #[test]
    fn a_period_goes_on() {
        assert_eq!(propose(&[1, 2, 3, 1, 2, 3], (8, 5)), [1, 2, 3, 1, 2]);
        assert_eq!(propose(&[5, 5, 5], (3, 9)), [5, 5, 5]);
    }
}
