//! Explains why a prefix hit ends where it does.
use super::{Index, Walk};
use crate::kind::Kind;
use crate::kinds::NONE;
use crate::prefix::content::Content;
use crate::prefix::tree::{Node, chain, salt_hash};
use crate::prefix::{MissReason, Viewer};

impl Index {
    /// See [`Cache::explain`](crate::Cache::explain).
    pub fn explain(
        &self,
        groups: &[Box<dyn Kind>],
        salt: &str,
        content: &Content<'_>,
        viewer: Viewer,
    ) -> MissReason {
        let keying = self.tree.keying();
        let mut buffer = Vec::new();
        let root = self.salts.get(salt).copied();
        let walk = match root {
            Some(root) => self.walk(groups, root, content, &mut buffer, |_| ()),
            None => Walk { n_matched: 0, n_hit: 0, node: NONE, hit_node: NONE },
        };
        let position = walk.n_matched * keying.block_tokens;
        if walk.n_hit < walk.n_matched {
            return MissReason::WindowGone { position: walk.n_hit * keying.block_tokens };
        }
        if walk.n_matched == self.n_usable(content) {
            return MissReason::UnalignedTail { position };
        }
        let key = keying.key(content, walk.n_matched, &mut buffer);
        let parent_hash = root.map_or(salt_hash(salt), |_| self.tree.hash(walk.node));
        if self.ghosts.contains(chain(parent_hash, key)) {
            return MissReason::Evicted { position };
        }
        if viewer == Viewer::Operator && position == 0 && self.first_blocks.any(key) {
            return MissReason::OtherSalt { position };
        }
        let common = |child: Node| self.tree.key(child).iter().zip(key).take_while(|(a, b)| a == b).count();
        let closest = match root {
            None => None,
            Some(_) if keying.has_tokens() => self.tree.children(walk.node).map(common).max(),
            Some(_) => self.tree.children(walk.node).next().map(|_| 0),
        };
        match closest {
            Some(in_block) if position + in_block as u32 > 0 => {
                MissReason::Diverged { position: position + in_block as u32 }
            }
            _ => MissReason::NeverSeen { position },
        }
    }
}
