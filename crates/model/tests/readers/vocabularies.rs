//! What files say about their tokens beside the vocabulary: which end an answer, which are looked for in texts, and how
//! words are cut.
use crate::gguf::{F32, File, list, texts, typed, uint, uints, vocabulary, words};
use crate::tokenizer::{TOKENIZER_JSON, folder};
use kvist_model::config::ModelConfig;
use kvist_model::tokenizer::Tokenizer;
use kvist_model::weights::Gguf;
use serde_json::{Value, json};

/// Token types.
const NORMAL: u32 = 1;
const CONTROL: u32 = 3;
const USER_DEFINED: u32 = 4;

fn gguf(file: &File) -> Gguf {
    Gguf::from_bytes("tokens.gguf", file.bytes()).unwrap()
}

fn tokenizer(file: &File) -> Tokenizer {
    Tokenizer::from_gguf(&gguf(file)).unwrap().unwrap()
}

/// Regression: only the end token that the file names ended an answer, and the chats of many files never stopped.
#[test]
fn end_tokens_are_recognised_by_their_text() {
    let mut file = File::good(); // with logits for five tokens
    vocabulary(&mut file, "llama", texts(&["a", "<|end|>", "b", "<|im_end|>", "c", "<end_of_turn>"]));
    let ends = |file: &File| ModelConfig::from_gguf(&gguf(file)).unwrap().eos;
    assert_eq!(ends(&file), [1, 3]);
    file.set("tokenizer.ggml.eos_token_id", uint(2));
    assert_eq!(ends(&file), [2, 1, 3]);
    // Ollama's list.
    file.set("tokenizer.ggml.eos_token_ids", uints(&[2, 4]));
    assert_eq!(ends(&file), [2, 4, 1, 3]);
}

/// A SentencePiece vocabulary with tokens that the `tokenizers` crate looks for before it cuts words.
fn spm(prefix: bool) -> Tokenizer {
    let tokens = [
        ("<unk>", 2),
        ("<s>", CONTROL),
        ("</s>", CONTROL),
        ("▁", NORMAL),
        ("a", NORMAL),
        ("b", NORMAL),
        ("▁a", NORMAL),
        ("▁b", NORMAL),
        ("<|x|>", USER_DEFINED),
        ("▁▁", USER_DEFINED),
        ("   ", USER_DEFINED),
        ("<|end|>", USER_DEFINED),
        ("<end_of_turn>", NORMAL),
    ];
    let mut file = File::good();
    let (names, kinds): (Vec<&str>, Vec<u32>) = tokens.into_iter().unzip();
    vocabulary(&mut file, "llama", texts(&names));
    file.set("tokenizer.ggml.token_type", uints(&kinds));
    let scores: Vec<u8> = (0..kinds.len()).flat_map(|i| (-(i as f32)).to_le_bytes()).collect();
    file.set("tokenizer.ggml.scores", list(F32, kinds.len() as u64, &scores));
    file.set("tokenizer.ggml.add_space_prefix", typed(7, &[u8::from(prefix)]));
    tokenizer(&file)
}

/// Regression: a user-defined token was looked for with a space in front of it. It was not found after a word, and took
/// the space elsewhere.
#[test]
fn tokens_that_users_defined_are_found_and_take_no_space() {
    let (blank, a, b, x, two, three, end, turn) = (3, 6, 7, 8, 9, 10, 11, 12);
    let bare_b = 5;
    for (prefix, text, expected) in [
        (true, "a<|x|>b", &[a, x, b][..]),
        (true, "a <|x|>b", &[a, blank, x, b]),
        (true, "<|x|>", &[x]),
        (true, "a  b", &[a, two, b]),
        (false, " a   b", &[a, three, bare_b]),
        (false, " a<|x|> b", &[a, x, b]),
        (true, "a<|end|>b<end_of_turn>", &[a, end, b, turn]),
    ] {
        assert_eq!(spm(prefix).encode(text, false).unwrap(), expected, "{prefix} {text:?}");
    }
    let spm = spm(true);
    assert_eq!(spm.decode(&[a, x, two, bare_b, three]).unwrap(), "a<|x|>  b   ");
    assert_eq!(spm.decode(&[a, end, turn]).unwrap(), "a", "what ends an answer has no text");
}

/// A byte-level vocabulary of `n` tokens that joins digits.
fn digits(architecture: &str, pre: Option<&str>, n: usize) -> Tokenizer {
    let mut file = File::good();
    file.set("general.architecture", words(architecture));
    let mut names: Vec<String> = ["1", "2", "3", "4", "12", "123", "1234"].map(String::from).to_vec();
    names.extend((names.len()..n).map(|i| format!("t{i}")));
    vocabulary(&mut file, "gpt2", texts(&names.iter().map(String::as_str).collect::<Vec<_>>()));
    file.set("tokenizer.ggml.merges", texts(&["1 2", "12 3", "123 4"]));
    if let Some(pre) = pre {
        file.set("tokenizer.ggml.pre", words(pre));
    }
    tokenizer(&file)
}

/// Regression: files without a pre-tokenizer got that of GPT-2, which gives wrong tokens with most models.
#[test]
fn a_missing_way_to_cut_words_is_inferred_or_refused() {
    for pre in [None, Some("default")] {
        assert_eq!(digits("qwen2", pre, 7).encode("1234", false).unwrap(), [0, 1, 2, 3]);
        assert_eq!(digits("llama", pre, 128_256).encode("1234", false).unwrap(), [5, 3]);
        let mut unknown = digits("llama", pre, 7);
        let error = unknown.encode("1234", false).unwrap_err().to_string();
        for word in ["tokens.gguf", "tokenizer.ggml.pre", "--guess-pretokenizer"] {
            assert!(error.contains(word), "{word}: {error}");
        }
        unknown.guess_pretokenizer();
        assert_eq!(unknown.encode("1234", false).unwrap(), [6]);
    }
    assert_eq!(
        digits("qwen2", Some("gpt-2"), 7).encode("1234", false).unwrap(),
        [6],
        "what a file says counts"
    );
}

/// Regression: a tokenizer saved by a training cut every prompt to that training's length, or filled it up.
#[test]
fn truncation_and_padding_are_not_obeyed() {
    let mut json: Value = serde_json::from_str(TOKENIZER_JSON).unwrap();
    json["truncation"] =
        json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    json["padding"] = json!({"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 1,
        "pad_type_id": 0, "pad_token": "b"});
    let folder = folder(&[("tokenizer.json", &json.to_string())]);
    let tokenizer = Tokenizer::from_folder(folder.path()).unwrap().unwrap();
    assert_eq!(tokenizer.encode("ab a a", true).unwrap(), [2, 3, 0, 3, 0]);
}

/// Regression: the special tokens of older folders, which have them in a file of their own, were not read.
#[test]
fn special_tokens_are_also_in_a_file_of_their_own() {
    let map = r#"{"bos_token": "a", "eos_token": {"content": "</s>", "lstrip": false}}"#;
    let eos = |config: &str| {
        let files = [
            ("tokenizer.json", TOKENIZER_JSON),
            ("tokenizer_config.json", config),
            ("special_tokens_map.json", map),
        ];
        Tokenizer::from_folder(folder(&files).path()).unwrap().unwrap().eos()
    };
    assert_eq!(eos("{}"), Some(5));
    assert_eq!(eos(r#"{"eos_token": null}"#), Some(5));
    assert_eq!(eos(r#"{"eos_token": "b"}"#), Some(1), "the newer file comes first");
}
