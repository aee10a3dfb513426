//! Sizes, offsets and views.
use super::*;

pub(super) const SEVEN_B: BufferLayout = BufferLayout {
    order: BufferOrder::BlockMajor,
    n_layers: 32,
    n_blocks: 2048,
    n_kv_heads: 32,
    block_tokens: 16,
    head_dim: 64,
};

/// The source counted the keys only (8 GiB), and 207,208 elements before block 101.
#[test]
fn sizes_and_offsets_are_right() {
    assert_eq!(SEVEN_B.elements(), Some(2_147_483_648));
    assert_eq!(SEVEN_B.bytes(4), Some(16 << 30));
    let huge = BufferLayout { n_layers: u32::MAX, n_blocks: u32::MAX, ..SEVEN_B };
    assert_eq!((huge.elements(), huge.bytes(2)), (None, None));
    let nearly = BufferLayout {
        n_layers: 1 << 30,
        n_blocks: 1 << 31,
        n_kv_heads: 2,
        block_tokens: 1,
        head_dim: 1,
        ..SEVEN_B
    };
    assert_eq!((nearly.elements(), nearly.bytes(4)), (Some(1 << 62), None));

    let block_101 = Handle { start: 101, len: 1, reserved: 1 };
    assert_eq!(SEVEN_B.keys(0, block_101, 16).unwrap().row(0, 0), Some(3_309_568));
    let from_100 = Handle { start: 100, len: 33, reserved: 33 };
    let keys = SEVEN_B.keys(0, from_100, 513).unwrap();
    assert_eq!(keys.row(0, 512), Some((100 + 32) * 32 * 16 * 64), "index 512 lies in the 33rd block");
    assert_eq!(keys.row(0, 17), Some(3_309_568 + 64));
    assert_eq!((keys.row(32, 0), keys.row(0, 513)), (None, None));
    assert_eq!(SEVEN_B.values(32, from_100, 1), None);
    assert_eq!(SEVEN_B.values(0, from_100, 33 * 16 + 1), None);
    assert_eq!(SEVEN_B.values(0, Handle { start: 2047, len: 2, reserved: 2 }, 1), None);
    assert_eq!(huge.keys(0, block_101, 1), None);
    let absurd = BufferLayout {
        n_blocks: 0,
        n_kv_heads: u32::MAX,
        block_tokens: u32::MAX,
        head_dim: u32::MAX,
        ..SEVEN_B
    };
    assert_eq!(absurd.keys(0, Handle { start: 0, len: 0, reserved: 0 }, 0), None);
}

/// Compares views with a walk through the buffer in its own order; every element is visited once.
#[test]
fn views_find_every_element() {
    for order in [BufferOrder::BlockMajor, BufferOrder::HeadMajor] {
        let layout =
            BufferLayout { order, n_layers: 3, n_blocks: 5, n_kv_heads: 2, block_tokens: 4, head_dim: 3 };
        let [nl, nb, nh, bt, hd] = [3u32, 5, 2, 4, 3];
        let mut place = BTreeMap::new();
        let (mut offset, mut elements) = (0u64, Vec::new());
        match order {
            BufferOrder::BlockMajor => {
                (0..nl).for_each(|l| (0..nb).for_each(|b| (0..nh).for_each(|h| elements.push((l, b, h)))));
            }
            BufferOrder::HeadMajor => {
                (0..nh).for_each(|h| (0..nl).for_each(|l| (0..nb).for_each(|b| elements.push((l, b, h)))));
            }
        }
        for (layer, block, head) in elements {
            for slot in 0..bt {
                place.insert((layer, block, head, slot), offset);
                offset += u64::from(hd);
            }
        }
        assert_eq!(layout.elements(), Some(offset));
        for (start, len) in [(0, 5), (1, 3), (4, 1)] {
            for layer in 0..nl {
                let n_tokens = len * bt - 1;
                let view = layout.values(layer, Handle { start, len, reserved: len }, n_tokens).unwrap();
                for head in 0..nh {
                    let expected = |token: u32| place[&(layer, start + token / bt, head, token % bt)];
                    for token in 0..n_tokens {
                        assert_eq!(view.row(head, token), Some(expected(token)), "{order:?}");
                        if let Some([by_head, by_token, 1]) = view.dense() {
                            let dense = view.first + u64::from(head) * by_head + u64::from(token) * by_token;
                            assert_eq!(dense, expected(token), "{order:?}");
                        }
                    }
                    let mut rows = Vec::new();
                    for (first, n) in view.pieces(head) {
                        rows.extend((0..n).map(|i| first + u64::from(i * hd)));
                    }
                    assert_eq!(rows, (0..n_tokens).map(expected).collect::<Vec<_>>(), "{order:?}");
                }
                assert_eq!(view.dense().is_some(), order == BufferOrder::HeadMajor || len == 1);
            }
        }
    }
}
