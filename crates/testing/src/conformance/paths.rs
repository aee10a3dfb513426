//! The paths that commits keep of draft trees, in caches where nodes do not outlive their step.
use super::rows::{self, StoredRows};
use crate::reference::{Choices, OwnedKept};
use kvist_cache::*;
use kvist_device::{Layout, Pools};

/// What every span keeps: all of each chain, and the path to a random node of each tree. `None` if the spans have no
/// trees, or if the commit does not settle them.
pub fn choose(choices: &mut Choices<'_>, spans: &[Span<'_>], settles: bool) -> Option<Vec<OwnedKept>> {
    if !settles || spans.iter().all(|span| matches!(span.new, New::Chain(_))) {
        return None;
    }
    let kept = spans.iter().map(|span| match span.new {
        New::Chain(_) => OwnedKept::All,
        New::Tree(parents) => {
            // Sometimes no node.
            let mut node = choices.below(parents.len() as u32 + 1).checked_sub(1).map(NodeId);
            let mut path = Vec::new();
            while let Some(n) = node {
                path.insert(0, n);
                node = parents[n.0 as usize];
            }
            OwnedKept::Path(path)
        }
    });
    Some(kept.collect())
}

/// Checks that the rows of every kept path lie in the first cells of its span, bit for bit as they were stored, where
/// `cells` of each group are those that the tokens were written to.
pub fn check_moved(
    pools: &dyn Pools,
    layout: &Layout,
    spans: &[Span<'_>],
    kept: &[OwnedKept],
    cells: &[Vec<u32>],
    before: &[StoredRows],
) -> Result<(), String> {
    let now = rows::stored(pools, layout, |group| &cells[group.0 as usize]).map_err(|e| e.to_string())?;
    let mut first = 0;
    for (span, kept) in spans.iter().zip(kept) {
        let n_tokens = match span.new {
            New::Chain(n) => n as usize,
            New::Tree(parents) => parents.len(),
        };
        let path: Vec<usize> = match kept {
            OwnedKept::Path(path) => path.iter().map(|node| node.0 as usize).collect(),
            _ => (0..n_tokens).collect(),
        };
        for (layer, (before, now)) in before.iter().zip(&now).enumerate() {
            let sides = before.iter().flatten().zip(now.iter().flatten());
            for (side, (before, now)) in ["K", "V"].into_iter().zip(sides) {
                for (i, node) in path.iter().enumerate() {
                    let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
                    if !before[first + node].iter().zip(&now[first + i]).all(same) {
                        return Err(format!(
                            "layer {layer} {side}: node {node} is not in cell {i} of {span:?}"
                        ));
                    }
                }
            }
        }
        first += n_tokens;
    }
    Ok(())
}
