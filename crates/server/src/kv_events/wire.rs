//! vLLM's KV events as bytes: MessagePack, as `vllm/distributed/kv_events.py` (0.33) writes it.
//!
//! A batch is an array of three: a time, its events, and the rank of the data-parallel engine. Without the rank Dynamo
//! drops the batch. An event is a map with the key `type`. vllm-router refuses events that lack one of the keys below,
//! and events with others.
use serde::Serialize;

/// Where blocks are, by vLLM's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum Medium {
    /// In the cache itself, on whatever device it is: routers know the first level by this name.
    #[serde(rename = "GPU")]
    Cache,
    /// In the tier in this machine's memory.
    #[serde(rename = "CPU")]
    Ram,
    /// In the tier on this machine's disk.
    #[serde(rename = "STORAGE")]
    Disk,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "type")]
pub(crate) enum Event {
    /// A chain of blocks: each one's parent is the one before it.
    BlockStored {
        block_hashes: Vec<u64>,
        /// `None` for the first block of a prompt.
        parent_block_hash: Option<u64>,
        /// `block_size` for each hash.
        token_ids: Vec<u32>,
        block_size: u32,
        lora_id: Option<u32>,
        medium: Medium,
        lora_name: Option<String>,
    },
    BlockRemoved {
        block_hashes: Vec<u64>,
        medium: Medium,
    },
    AllBlocksCleared,
}

/// kvist is one engine.
const RANK: u32 = 0;

/// The payload of a message. `time_s` is in seconds since 1970.
pub(crate) fn batch(time_s: f64, events: &[Event]) -> Result<Vec<u8>, rmp_serde::encode::Error> {
    rmp_serde::to_vec_named(&(time_s, events, RANK))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes that msgspec writes for vLLM's own classes, from its source: maps with `type` first.
    #[test]
    fn a_batch_is_an_array_of_time_events_and_rank() {
        let stored = Event::BlockStored {
            block_hashes: vec![7, u64::MAX],
            parent_block_hash: None,
            token_ids: vec![1, 300],
            block_size: 1,
            lora_id: None,
            medium: Medium::Cache,
            lora_name: None,
        };
        let removed = Event::BlockRemoved { block_hashes: vec![7], medium: Medium::Cache };
        let bytes = batch(1.5, &[stored, removed, Event::AllBlocksCleared]).unwrap();
        let mut expected: Vec<u8> = vec![0x93, 0xcb, 0x3f, 0xf8, 0, 0, 0, 0, 0, 0, 0x93];
        let text = |out: &mut Vec<u8>, text: &str| {
            out.push(0xa0 | text.len() as u8);
            out.extend(text.as_bytes());
        };
        expected.push(0x88);
        for name in ["type", "BlockStored", "block_hashes"] {
            text(&mut expected, name);
        }
        expected.extend([0x92, 7, 0xcf]);
        expected.extend([0xff; 8]);
        text(&mut expected, "parent_block_hash");
        expected.push(0xc0);
        text(&mut expected, "token_ids");
        expected.extend([0x92, 1, 0xcd, 0x01, 0x2c]);
        text(&mut expected, "block_size");
        expected.push(1);
        text(&mut expected, "lora_id");
        expected.push(0xc0);
        for name in ["medium", "GPU", "lora_name"] {
            text(&mut expected, name);
        }
        expected.push(0xc0);
        expected.push(0x83);
        for name in ["type", "BlockRemoved", "block_hashes"] {
            text(&mut expected, name);
        }
        expected.extend([0x91, 7]);
        for name in ["medium", "GPU"] {
            text(&mut expected, name);
        }
        expected.push(0x81);
        for name in ["type", "AllBlocksCleared"] {
            text(&mut expected, name);
        }
        expected.push(0);
        assert_eq!(bytes, expected);
    }
}
