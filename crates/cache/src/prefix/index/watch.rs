//! The log of prefix events.
use super::{Index, Node};
use crate::ids::GroupId;
use crate::kinds::NONE;
use crate::prefix::PrefixEvent;

impl Index {
    /// Turns the log on or off. A log that is turned on begins with everything the index stores, parents before their
    /// children: read from its start, it tells the whole index.
    pub fn watch(&mut self, on: bool) {
        if !on {
            self.events = None;
        } else if self.events.is_none() {
            self.events = Some(self.stored());
        }
    }

    fn stored(&self) -> Vec<PrefixEvent> {
        let mut events = Vec::new();
        let mut left: Vec<_> = self.roots.keys().copied().collect();
        while let Some(parent) = left.pop() {
            for node in self.tree.children(parent) {
                left.push(node);
                for (g, group) in self.groups.iter().enumerate() {
                    let block = group.block(node);
                    if block != NONE {
                        events.push(self.stored_event(g, block, node));
                    }
                }
            }
        }
        events
    }

    /// `block` of `group` stores the tokens of `node`.
    pub(super) fn stored_event(&self, group: usize, block: u32, node: Node) -> PrefixEvent {
        PrefixEvent::Stored {
            group: GroupId(group as u16),
            block,
            hash: self.tree.hash(node),
            parent_hash: self.tree.hash(self.tree.parent(node)),
            key: self.tree.key(node).into(),
        }
    }
}
