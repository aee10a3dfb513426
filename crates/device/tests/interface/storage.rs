//! Names and sizes of KV storages.
use kvist_device::*;

#[test]
fn names_read_back_as_themselves() {
    for dtype in DType::ALL {
        for group in [32, 64] {
            for (rotate, outliers) in [(false, false), (true, false), (false, true)] {
                let turns_itself = dtype == DType::T4;
                if !dtype.has_groups() && group == 64 || turns_itself && rotate || !turns_itself && outliers {
                    continue; // without groups there is only one name
                }
                let storage = Storage { dtype, group, rotate, outliers };
                assert_eq!(storage.to_string().parse(), Ok(storage), "{storage}");
            }
        }
    }
    let cases =
        [("q8-32", "q8"), ("q4-64-rot", "q4-64-rot"), ("f16-rot", "f16-rot"), ("q4-32-rot", "q4-rot")];
    for (text, name) in cases {
        assert_eq!(text.parse::<Storage>().unwrap().to_string(), name, "{text}");
    }
}

#[test]
fn other_names_are_refused_and_the_known_ones_told() {
    let wrong = [
        "",
        "-",
        "q5",
        "Q8",
        "f8",
        "f16-64",
        "q8-",
        "q8-48",
        "q8-rot-64",
        "q8-rot-rot",
        "q8 ",
        "rot",
        "-rot",
        "q4-064",
        "q8-o",
        "t4-64",
        "t4-rot",
        "t4-o-o",
    ];
    for text in wrong {
        let refused = text.parse::<Storage>().expect_err(text);
        for known in ["f32", "f16", "bf16", "q8", "q4", "t4", "t4-o", "q8-64", "-rot"] {
            assert!(refused.contains(known), "`{text}`: {refused}");
        }
    }
}

#[test]
fn rows_have_the_bytes_their_format_says() {
    let cases = [
        // storage, head_dim, bytes, bits per value
        ("f32", 128, 512, 32.0),
        ("f16", 128, 256, 16.0),
        ("bf16", 128, 256, 16.0),
        ("q8", 128, 136, 8.5),
        ("q8-64", 128, 132, 8.25),
        ("q4", 128, 80, 5.0),
        ("q4-64", 128, 72, 4.5),
        ("q4-64-rot", 128, 72, 4.5), // rotation needs no extra bytes
        // 80 = 32 + 32 + 16: the last group is shorter and has its own scale and minimum
        ("q8", 80, 86, 8.6),
        ("q4", 80, 52, 5.2),
        ("q8-64", 80, 84, 8.4),
        ("q4-64", 80, 48, 4.8),
        ("q4", 33, 25, 200.0 / 33.0), // half a byte more for the odd element
        ("q8", 1, 3, 24.0),
        ("t4", 64, 34, 4.25),
        ("t4", 128, 66, 4.125),
        ("t4", 80, 42, 4.2),
        ("t4-o", 64, 40, 5.0),   // 8 of 64 channels in 8 bits, and a scale for them
        ("t4-o", 128, 76, 4.75), // 16 of 128
        ("t4-o", 80, 52, 5.2),   // 16 of 80: an eighth, rounded up to a multiple of 8
        ("t4-o", 256, 148, 4.625),
        ("t4-o", 2, 3, 12.0), // fewer than four channels, so no outliers
        ("t4-o", 6, 9, 12.0),
    ];
    for (name, head_dim, bytes, bits) in cases {
        let storage: Storage = name.parse().unwrap();
        assert_eq!(storage.row_bytes(head_dim), bytes, "{name} × {head_dim}");
        assert_eq!(bytes as f64 * 8.0 / f64::from(head_dim), bits, "{name} × {head_dim}");
    }
}

#[test]
fn pools_are_reserved_in_doubling_segments() {
    let cases = [
        // used, capacity, reserved
        (0, 1_000, 0),
        (1, 1_000, 256),
        (256, 1_000, 256),
        (257, 1_000, 512),
        (512, 1_000, 512),
        (513, 1_000, 1_000),
        (1, 100, 100),
        (100, 100, 100),
        (u32::MAX, u32::MAX, u32::MAX),
        (1 << 31, u32::MAX, 1 << 31),
        ((1 << 31) + 1, u32::MAX, u32::MAX),
    ];
    for (used, capacity, reserved) in cases {
        assert_eq!(reserved_cells(used, capacity), reserved, "{used} of {capacity}");
    }
    for (first, used, reserved) in
        [(512, 0, 0), (512, 1, 512), (512, 513, 1_024), (600, 1, 1_024), (4_096, 1, 3_000)]
    {
        assert_eq!(reserved_cells_from(first, used, 3_000), reserved, "{used} from {first}");
    }
}
