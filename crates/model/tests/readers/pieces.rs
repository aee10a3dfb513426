//! The concatenated bytes of all tokens are the text.
use kvist_cpu::Cpu;
use kvist_device::MemoryBudget;
use kvist_model::tokenizer::Tokenizer;
use kvist_model::{LoadOptions, Model, ModelFile};
use kvist_testing::SplitMix64;
use std::path::Path;

fn check(name: &str, tokenizer: &Tokenizer, vocab: usize) {
    let pieces = tokenizer.pieces(vocab + 3).unwrap();
    assert_eq!(pieces.len(), vocab + 3, "{name}");
    assert!(pieces[vocab..].iter().all(|p| p.bytes.is_empty() && !p.control), "{name}: ids without a token");
    assert!(pieces[..vocab].iter().all(|p| !p.bytes.is_empty()), "{name}: tokens without bytes");
    let mut random = SplitMix64(5);
    let mut below = |n: usize| random.index(n);
    let mut compared = 0;
    for _ in 0..4000 {
        let tokens: Vec<u32> = (0..1 + below(6)).map(|_| below(vocab) as u32).collect();
        let texts = tokens.iter().map(|t| &pieces[*t as usize]).filter(|p| !p.control);
        let bytes: Vec<u8> = texts.flat_map(|p| p.bytes.clone()).collect();
        // For invalid UTF-8, decoders differ in the number of replacement characters.
        let Ok(text) = String::from_utf8(bytes) else { continue };
        let decoded = tokenizer.decode(&tokens).unwrap();
        // SentencePiece drops a space at the start.
        let same = decoded == text || text.strip_prefix(' ') == Some(&decoded);
        assert!(same, "{name}: {tokens:?} are {decoded:?}, their bytes {text:?}");
        compared += 1;
    }
    assert!(compared > 500, "{name}: {compared} compared");
}

#[test]
fn bytes_of_tokens_are_their_text() {
    let budget = MemoryBudget::unlimited();
    let model =
        Model::load(&ModelFile::Embedded, Cpu::default(), &LoadOptions::default(), &budget, &mut |_, _| {})
            .unwrap();
    let tokenizer = model.tokenizer().unwrap();
    check("embedded", tokenizer, tokenizer.vocab_size());
    for case in ["spm", "bpe-llama-bpe", "bpe-qwen2"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/fixtures/tokenizers")
            .join(case)
            .join("model.gguf");
        let bytes = std::fs::read(&path).unwrap();
        let gguf = kvist_model::weights::Gguf::from_bytes(case, bytes).unwrap();
        let tokenizer = Tokenizer::from_gguf(&gguf).unwrap().unwrap();
        check(case, &tokenizer, tokenizer.vocab_size());
    }
}
