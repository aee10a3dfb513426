//! A drafter that knows the texts.
use kvist_engine::speculate::{DraftRequest, Drafter};
use kvist_model::Error;
use kvist_testing::SplitMix64;

/// Draws trees around known texts in which some nodes are right.
pub struct Oracle {
    /// Prompts with their answers.
    pub texts: Vec<Vec<u32>>,
    pub vocab: u32,
    pub random: SplitMix64,
}

impl Drafter for Oracle {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<(), Error> {
        for DraftRequest { tokens, bounds, tree, .. } in requests {
            let text = self.texts.iter().find(|text| text.starts_with(tokens));
            let text = text.expect("what is known is the beginning of a text");
            // The node that is right so far, and what would follow it.
            let (mut right, mut depth) = (None, 0);
            while tree.len() < bounds.tokens as usize && self.random.below(8) > 0 {
                let truth = text.get(tokens.len() + depth as usize).copied();
                if let Some(truth) = truth.filter(|_| depth < bounds.depth && self.random.below(2) == 0)
                    && tree.child(right, truth).is_none()
                {
                    right = Some(tree.push(right, truth, 0.5));
                    depth += 1;
                    continue;
                }
                // A wrong node somewhere. In a chain only behind the last one.
                let any = (tree.len() as u32).checked_sub(1).filter(|_| bounds.width == 1);
                let any = any.or_else(|| self.random.below(tree.len() as u32 + 1).checked_sub(1));
                let deep = any.map_or(0, |node| tree.depth(node) + 1);
                let wrong = self.random.below(self.vocab);
                if deep < bounds.depth && Some(wrong) != truth && tree.child(any, wrong).is_none() {
                    tree.push(any, wrong, 0.1);
                }
                if bounds.width == 1 {
                    right = None;
                    depth = bounds.depth; // nothing right follows a wrong node
                }
            }
        }
        Ok(())
    }
}
