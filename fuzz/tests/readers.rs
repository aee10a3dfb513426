//! The fuzzer's bytes as files and texts from untrusted sources: anything may be refused, but nothing may panic.
mod changed;

use changed::changed;
use kvist_engine::text::StopMatcher;
use kvist_model::config::{ModelConfig, Role, TensorSpec};
use kvist_model::template::{ChatTemplate, Message};
use kvist_model::tokenizer::Tokenizer;
use kvist_model::weights::{Encoding, Gguf, Source};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// Iterations of an ordinary test run; a fuzzing engine sets its own number.
const ITERATIONS: usize = 1_000;
/// Modified copies of real files: purely random bytes do not get past a magic number.
const CHANGED: u64 = 150;

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/model/tests/fixtures").join(path)
}

fn gguf(bytes: &[u8]) {
    let Ok(gguf) = Gguf::from_bytes("fuzz.gguf", bytes.to_vec()) else { return };
    let _ = ChatTemplate::from_gguf(&gguf);
    if let Ok(Some(tokenizer)) = Tokenizer::from_gguf(&gguf) {
        let tokens = tokenizer.encode("Two words, é\n", true).unwrap_or_default();
        let mut stream = tokenizer.stream();
        for token in tokens.into_iter().chain(0..8) {
            let _ = stream.push(token);
        }
    }
    for encoding in Encoding::all() {
        let _ = gguf.tensor(&encoding.name().to_uppercase()).and_then(|view| view.to_f32());
    }
    if let Ok(config) = ModelConfig::from_gguf(&gguf) {
        for spec in config.tensors() {
            let _ = gguf.find(&spec.name).and_then(|view| view.to_f32());
        }
    }
}

#[test]
fn readers_gguf() {
    bolero::check!().with_iterations(ITERATIONS).for_each(gguf);
    for case in ["tokenizers/spm/model.gguf", "tokenizers/bpe-qwen2/model.gguf", "types/model.gguf"] {
        let real = std::fs::read(fixture(case)).expect("a fixture of the engine");
        (0..CHANGED / 3).for_each(|seed| gguf(&changed(&real, seed)));
    }
}

/// A file that claims to be one of several parts, opened by its name.
#[test]
fn readers_split() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let name = folder.path().join("x-00001-of-00002.gguf");
    let read = |bytes: &[u8]| {
        std::fs::write(&name, bytes).expect("a temporary file");
        let _ = Source::gguf_file(&name, false);
    };
    let numbers = [0, 1, 2, 3, 99_999, 100_000, u64::from(u32::MAX), u64::MAX - 1, u64::MAX];
    for number in numbers {
        for count in numbers {
            let real =
                gguf_of(&[("split.no", number), ("split.count", count), ("split.tensors.count", count)]);
            read(&real);
            (0..CHANGED / 50).for_each(|seed| read(&changed(&real, seed)));
        }
    }
    bolero::check!().with_iterations(ITERATIONS).for_each(|bytes: &[u8]| read(bytes));
}

#[test]
fn readers_safetensors() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let name = folder.path().join("model.safetensors");
    let experts =
        ModelConfig::from_folder(&fixture("parity/gpt-oss-mxfp4")).expect("a fixture of the engine");
    let experts: Vec<_> =
        experts.tensors().into_iter().filter(|spec| spec.name.contains(".experts.")).collect();
    let read = |bytes: &[u8]| {
        std::fs::write(&name, bytes).expect("a temporary file");
        let Ok(source) = Source::folder(folder.path(), false) else { return };
        for name in ["model.norm.weight", "x", "lm_head.weight"] {
            for shape in [vec![32], vec![2], vec![104, 32]] {
                let spec = TensorSpec { name: name.into(), shape, role: Role::Norm, within: None };
                let _ = source.find(&spec).and_then(|view| view.to_f32());
            }
        }
        for spec in &experts {
            let _ = source.find(spec).and_then(|view| view.to_f32());
        }
    };
    bolero::check!().with_iterations(ITERATIONS).for_each(|bytes: &[u8]| read(bytes));
    for case in ["parity/llama-gqa", "parity/gpt-oss-mxfp4"] {
        let real = std::fs::read(fixture(case).join("model.safetensors")).expect("a fixture of the engine");
        // Almost all of the file is data; only the header can be invalid.
        let header = real.len().min(4_000);
        for seed in 0..CHANGED / 2 {
            let mut bytes = changed(&real[..header], seed);
            bytes.extend_from_slice(&real[header..]);
            read(&bytes);
        }
    }
}

#[test]
fn readers_config() {
    let read = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        if let Ok(config) = ModelConfig::from_json("config.json", &text)
            && config.n_layers < 1_000
            && config.head_dim < 1 << 16
        {
            let _ = (
                config.tensors(),
                config.layout().check(),
                config.ropes.iter().flat_map(|rope| rope.inv_freq(64)).sum::<f32>(),
            );
        }
    };
    bolero::check!().with_iterations(ITERATIONS).for_each(|bytes: &[u8]| read(bytes));
    let cases = [
        "llama-rope-llama3",
        "llama-rope-yarn",
        "llama-shared-kv",
        "qwen2-window-mixed",
        "smollm3",
        "gemma2",
        "gemma3",
        "phi3-longrope-long",
        "qwen3-moe-mixed",
        "gpt-oss",
    ];
    for case in cases {
        let real = std::fs::read(fixture("parity").join(case).join("config.json"));
        let real = real.expect("a fixture of the engine");
        (0..CHANGED / 2).for_each(|seed| read(&changed(&real, seed)));
    }
}

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let bytes = std::fs::read(fixture("tokenizers/spm/model.gguf")).expect("a fixture of the engine");
    let gguf = Gguf::from_bytes("fixture", bytes).expect("a good file");
    Tokenizer::from_gguf(&gguf).expect("a good vocabulary").expect("a vocabulary")
});

fn template(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(template) = ChatTemplate::new("fuzz.jinja", &text) {
        let messages =
            [Message::new("system", "s"), Message::new("user", &text), Message::new("assistant", "")];
        let _ = template.render(&messages, &TOKENIZER, true);
        let _ = template.render(&[], &TOKENIZER, false);
    }
}

#[test]
fn readers_template() {
    bolero::check!().with_iterations(ITERATIONS).for_each(template);
    for seed in 0..CHANGED * 4 {
        template(&changed(TEMPLATES[seed as usize % TEMPLATES.len()].as_bytes(), seed));
    }
    // Deeper than the stack allows: nested, and in chains.
    for (open, close) in [("(", ")"), ("[", "]"), ("{'a':", "}"), ("{% if a %}", "{% endif %}"), ("{{ -", "")]
    {
        for depth in [100, 10_000, 100_000] {
            let (open, close) = (open.repeat(depth), close.repeat(depth));
            template(format!("{{{{ {open}1{close} }}}}").as_bytes());
            template(format!("{open}{close}").as_bytes());
        }
    }
    let chained =
        ["-", "- ", "not ", "a+", "a~", "a*", "a**", "a and ", "a or ", "a<", "a in ", "a if a else ", "a."];
    let appended = [".a", "[0]", "|e", "(1)", " is a", " is not a"];
    for links in [500, 20_000] {
        for link in chained {
            template(format!("{{{{ {}a }}}}", link.repeat(links)).as_bytes());
        }
        for link in appended {
            template(format!("{{{{ a{} }}}}", link.repeat(links)).as_bytes());
        }
    }
    let branches = "{%elif a%}".repeat(12_000);
    template(format!("{{% if a %}}{branches}{{% endif %}}").as_bytes());
}

const TEMPLATES: [&str; 4] = [
    "{{ bos_token }}{% for m in messages[1:] %}{{ m['role'] + ': ' + m.content.strip() }}\n{% endfor %}",
    "{%- set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + loop.index0 %}{% endfor %}{{ ns.n }}",
    "{% if messages|length % 2 %}{{ raise_exception('odd ' ~ messages|tojson(indent=2)) }}{% endif %}{{ 'a' * 9 }}",
    "{% macro f(x) %}{{ x.split()[-1] }}{% endmacro %}{% generation %}{{ f(messages[0].content) }}{% endgeneration %}",
];

/// The first byte splits the rest into stop strings and text. The text arrives in pieces, whose lengths its own bytes
/// give.
fn stops(bytes: &[u8]) {
    let Some((stops, bytes)) = bytes.split_first() else { return };
    let (stops, text) = bytes.split_at((*stops as usize % 16).min(bytes.len()));
    // A small alphabet, so that stop strings occur in the text.
    let letters =
        |bytes: &[u8]| -> String { bytes.iter().map(|b| ['a', 'b', 'é', '日'][*b as usize % 4]).collect() };
    let stops: Vec<String> = stops.chunks(3).map(letters).collect();
    let whole = letters(text);
    let ends = whole.char_indices().map(|(at, c)| at + c.len_utf8());
    let complete = ends.filter_map(|end| {
        let longest = stops.iter().filter(|s| whole[..end].ends_with(s.as_str())).max_by_key(|s| s.len())?;
        Some(&whole[..end - longest.len()])
    });
    let expected = complete.into_iter().next();

    let (mut matcher, mut out, mut rest) = (StopMatcher::new(&stops), String::new(), whole.as_str());
    let mut stopped = false;
    for byte in text {
        let at = rest.char_indices().nth(*byte as usize % 5).map_or(rest.len(), |(at, _)| at);
        let (piece, after) = rest.split_at(at);
        rest = after;
        stopped = matcher.push(piece, &mut out).is_some();
        assert!(expected.unwrap_or(&whole).starts_with(&out), "{out:?} of {whole:?} until {stops:?}");
        if stopped {
            break;
        }
    }
    if !stopped {
        stopped = matcher.push(rest, &mut out).is_some();
        if !stopped {
            matcher.finish(&mut out);
        }
    }
    assert_eq!((stopped, out.as_str()), (expected.is_some(), expected.unwrap_or(&whole)), "until {stops:?}");
}

#[test]
fn readers_stops() {
    bolero::check!().with_iterations(10 * ITERATIONS).for_each(stops);
}

/// Rewrites the committed corpus: `cargo test -p kvist-fuzz -- --ignored write_readers_corpus`.
#[test]
#[ignore = "writes files into the source tree"]
fn write_readers_corpus() {
    let write = |target: &str, name: &str, bytes: &[u8]| {
        let dir = format!("{}/tests/__fuzz__/readers_{target}/corpus", env!("CARGO_MANIFEST_DIR"));
        std::fs::create_dir_all(&dir).expect("the source tree can be written");
        std::fs::write(format!("{dir}/{name}"), bytes).expect("the source tree can be written");
        for seed in 0..2 {
            let bytes = changed(bytes, seed);
            std::fs::write(format!("{dir}/{name}-changed-{seed}"), bytes)
                .expect("the source tree can be written");
        }
    };
    write("gguf", "small", &small_gguf());
    let header = r#"{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    let small = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 8]].concat();
    write("safetensors", "small", &small);
    for case in ["llama-rope-yarn", "qwen2-window-mixed"] {
        let config = fixture("parity").join(case).join("config.json");
        write("config", case, &std::fs::read(config).expect("a fixture of the engine"));
    }
    for (i, template) in TEMPLATES.iter().enumerate() {
        write("template", &format!("template-{i}"), template.as_bytes());
    }
    write("stops", "two", b"\x06abcbcdabababcdabcd");
}

/// One value of each type that has a length, and one tensor.
fn small_gguf() -> Vec<u8> {
    gguf_of(&[])
}

/// Like [`small_gguf`], with these numbers.
fn gguf_of(numbers: &[(&str, u64)]) -> Vec<u8> {
    let text = |s: &str| [&(s.len() as u64).to_le_bytes(), s.as_bytes()].concat();
    let word = |n: u32| n.to_le_bytes().to_vec();
    let long = |n: u64| n.to_le_bytes().to_vec();
    let mut bytes = [
        b"GGUF".to_vec(),
        [word(3), long(1), long(4 + numbers.len() as u64)].concat(),
        [text("general.architecture"), word(8), text("llama")].concat(),
        [text("tokenizer.ggml.model"), word(8), text("llama")].concat(),
        [text("tokenizer.ggml.tokens"), word(9), word(8), long(2), text("a"), text("b")].concat(),
        [text("tokenizer.ggml.scores"), word(9), word(6), long(2), vec![0; 8]].concat(),
        numbers.iter().flat_map(|(key, n)| [text(key), word(10), long(*n)].concat()).collect(),
        [text("token_embd.weight"), word(2), long(2), long(2), word(0), long(0)].concat(),
    ]
    .concat();
    bytes.resize(bytes.len().next_multiple_of(32) + 16, 0);
    bytes
}
