//! Every tensor type: decoded values match ggml's Python package, and files with a wrong number of bytes are refused.
use crate::common::fixtures;
use kvist_model::weights::{Encoding, Gguf, View};

#[test]
fn every_type_decodes_to_what_ggml_says() {
    let path = fixtures("types").join("model.gguf");
    let gguf = Gguf::from_bytes("types", std::fs::read(path).unwrap()).unwrap();
    let mut n_seen = 0;
    for encoding in Encoding::all() {
        let name = encoding.name().to_uppercase();
        if !gguf.has(&name) {
            // Floats have their own tests. ggml's package does not decode the others, which no weight file contains.
            assert!(
                encoding.is_float() || ["q8_1", "q8_K"].contains(&encoding.name()),
                "{name} is not in the file"
            );
            continue;
        }
        n_seen += 1;
        let found = gguf.tensor(&name).unwrap();
        assert_eq!((found.encoding, found.shape.as_slice()), (encoding, &[3, 256][..]));
        let expected = gguf.tensor(&format!("{name}.values")).unwrap().to_f32().unwrap();
        let found = found.to_f32().unwrap();
        let wrong = found.iter().zip(&expected).position(|(found, expected)| found != expected);
        if let Some(i) = wrong {
            panic!("{name}: element {i} is {}, not {}", found[i], expected[i]);
        }
    }
    assert_eq!(n_seen, 24);
}

/// The two types that occur only during computation.
#[test]
fn types_of_intermediate_results_are_read() {
    let d = half::f16::from_f32(0.25).to_le_bytes();
    let codes: Vec<u8> = (0..32).map(|i: i8| (i * 3 - 50).cast_unsigned()).collect();
    let q8_1 = [&d[..], &[9, 9], &codes].concat();
    let values: Vec<f32> = codes.iter().map(|code| 0.25 * f32::from(code.cast_signed())).collect();
    let view = View::new("x", vec![1, 32], Encoding::Q8_1, &q8_1).unwrap();
    assert_eq!(view.to_f32().unwrap(), values);
    let q8_k = [&0.25f32.to_le_bytes()[..], &codes.repeat(8), &[7; 32]].concat();
    let view = View::new("x", vec![256], Encoding::Q8K, &q8_k).unwrap();
    assert_eq!(view.to_f32().unwrap(), values.repeat(8));
    // Its scale is an f32, which as f16 would be 0 or infinite.
    for d in [1e-9f32, 1e9] {
        let q8_k = [&d.to_le_bytes()[..], &codes.repeat(8), &[7; 32]].concat();
        let view = View::new("x", vec![256], Encoding::Q8K, &q8_k).unwrap();
        let values: Vec<f32> = codes.iter().map(|code| d * f32::from(code.cast_signed())).collect();
        assert_eq!(view.to_f32().unwrap(), values.repeat(8));
    }
}

#[test]
fn bytes_that_are_no_tensor_are_refused() {
    for encoding in Encoding::all() {
        let (elements, size) = encoding.block();
        let bytes = vec![0; 3 * size];
        let view = |shape: &[usize], n: usize| View::new("x", shape.to_vec(), encoding, &bytes[..n]);
        assert!(view(&[3, elements], 3 * size).is_some(), "{}", encoding.name());
        assert!(view(&[3, elements], 3 * size - 1).is_none());
        assert!(view(&[2, elements], 3 * size).is_none());
        assert!(view(&[], 3 * size).is_none());
        assert!(view(&[0, elements], 0).is_none());
        assert!(view(&[usize::MAX, elements], 3 * size).is_none());
        if elements > 1 {
            assert!(view(&[3, elements - 1], 3 * size).is_none());
            assert!(view(&[3 * elements, 1], 3 * size).is_none());
        }
    }
}
