//! Constrained output: what the embedded model writes at temperature 1 is valid whenever it ends by itself;
//! masks equal the result of trying every token; hostile schemas end in an error soon.
use kvist_cache::SeqId;
use kvist_cpu::Cpu;
use kvist_device::MemoryBudget;
use kvist_engine::grammar::{Grammar, GrammarCompiler, ResponseFormat};
use kvist_engine::memory::CacheConfig;
use kvist_engine::sampler::{Sampler, SamplerConfig};
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_engine::tools::{ToolChoice, ToolFormat, tools_from_json};
use kvist_model::tokenizer::Tokenizer;
use kvist_model::{LoadOptions, Model, ModelFile};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Hostile schemas are stopped by counters, quickly on any machine. This limit only detects ones that never
/// end.
const PATIENCE: Duration = Duration::from_secs(300);

fn grammar(schema: Value) -> Grammar {
    let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
    ResponseFormat::from_json(&format).unwrap().grammar().unwrap()
}

/// Validates a value against a schema; supports the keywords that these tests use.
fn admits(schema: &Value, value: &Value, root: &Value) -> bool {
    let Value::Object(map) = schema else { return schema == &json!(true) };
    map.iter().all(|(keyword, s)| match keyword.as_str() {
        "type" => s.as_array().unwrap_or(&vec![s.clone()]).iter().any(|kind| match kind.as_str().unwrap() {
            "null" => value.is_null(),
            "boolean" => value.is_boolean(),
            "integer" => value.as_f64().is_some_and(|n| n.fract() == 0.0),
            "number" => value.is_number(),
            "string" => value.is_string(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            other => panic!("{other}"),
        }),
        "properties" => {
            let Some(object) = value.as_object() else { return true };
            s.as_object().unwrap().iter().all(|(k, s)| object.get(k).is_none_or(|v| admits(s, v, root)))
        }
        "required" => {
            let Some(object) = value.as_object() else { return true };
            s.as_array().unwrap().iter().all(|k| object.contains_key(k.as_str().unwrap()))
        }
        "additionalProperties" => {
            let Some(object) = value.as_object() else { return true };
            let named = |k: &str| map.get("properties").is_some_and(|p| p.get(k).is_some());
            object.iter().filter(|(k, _)| !named(k)).all(|(_, v)| admits(s, v, root))
        }
        "items" => value.as_array().is_none_or(|list| list.iter().all(|v| admits(s, v, root))),
        "minItems" => value.as_array().is_none_or(|list| list.len() as u64 >= s.as_u64().unwrap()),
        "maxItems" => value.as_array().is_none_or(|list| list.len() as u64 <= s.as_u64().unwrap()),
        "minLength" => value.as_str().is_none_or(|t| t.chars().count() as u64 >= s.as_u64().unwrap()),
        "maxLength" => value.as_str().is_none_or(|t| t.chars().count() as u64 <= s.as_u64().unwrap()),
        "minimum" => value.as_f64().is_none_or(|n| n >= s.as_f64().unwrap()),
        "maximum" => value.as_f64().is_none_or(|n| n <= s.as_f64().unwrap()),
        "enum" => s.as_array().unwrap().contains(value),
        "const" => s == value,
        "anyOf" => s.as_array().unwrap().iter().any(|s| admits(s, value, root)),
        "$ref" => admits(root.pointer(s.as_str().unwrap().trim_start_matches('#')).unwrap(), value, root),
        "$defs" | "title" | "description" => true,
        other => panic!("the test's validator does not know `{other}`"),
    })
}

struct Writer {
    model: Arc<Model>,
    grammars: GrammarCompiler,
    session: ModelSession,
}

impl Writer {
    fn new() -> Self {
        let budget = MemoryBudget::unlimited();
        let model = Model::load(
            &ModelFile::Embedded,
            Cpu::default(),
            &LoadOptions::default(),
            &budget,
            &mut |_, _| {},
        )
        .unwrap();
        let model = Arc::new(model);
        let session =
            ModelSession::new(&model, &kvist_engine::devices::all(), &CacheConfig::new(512)).unwrap();
        let grammars = GrammarCompiler::of_model(&model).unwrap();
        Writer { model, grammars, session }
    }

    /// Generates at most `max` tokens at temperature 1; returns the text and whether it ended by itself.
    fn write(&mut self, grammar: &Grammar, seed: u64, max: usize) -> (String, bool) {
        let tokenizer = self.model.tokenizer().unwrap();
        let mut constraint = self.grammars.compile(grammar).unwrap().constraint();
        let config = SamplerConfig { temperature: 1.0, seed, ..SamplerConfig::greedy() };
        let mut sampler = Sampler::new(config).unwrap();
        let prompt = tokenizer.encode("fn main() { let value = ", true).unwrap();
        self.session.clear().unwrap();
        self.session.prefill(SeqId::ONLY, &prompt, &mut |_| true).unwrap();
        let (mut text, mut bytes) = (tokenizer.stream(), String::new());
        for _ in 0..max {
            let mut logits = self.session.logits_row(0).to_vec();
            constraint.mask(&mut logits).unwrap();
            let token = sampler.sample(&logits).unwrap();
            assert!(logits[token as usize].is_finite(), "the sampler took a forbidden token");
            let ended = constraint.accept(token).unwrap();
            bytes += &text.push(token).unwrap();
            if ended {
                return (bytes + &text.finish().unwrap(), true);
            }
            self.session
                .forward(&[SequenceInput::chain(SeqId::ONLY, &[token])], LogitRows::LastOfEach)
                .unwrap();
        }
        (bytes + &text.finish().unwrap(), false)
    }
}

fn schemas() -> Vec<Value> {
    vec![
        json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150}}, "required": ["name", "age"], "additionalProperties": false}),
        json!({"type": "array", "items": {"enum": ["red", "green", 3, null, "né"]}, "minItems": 2, "maxItems": 4}),
        json!({"type": "array", "items": {"type": ["boolean", "null"]}, "minItems": 1, "maxItems": 5}),
        json!({"anyOf": [{"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"], "additionalProperties": false}, {"type": "integer", "minimum": -5, "maximum": 5}]}),
        json!({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"value": {"type": "number", "minimum": 0, "maximum": 1}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["value", "next"], "additionalProperties": false}}}),
        json!({"type": "object", "properties": {"a": {"type": "string", "minLength": 3, "maxLength": 6}, "b": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false}),
        json!({"type": "object", "properties": {"a": {"type": "string", "minLength": 3, "maxLength": 6}}, "additionalProperties": {"type": "integer", "maximum": 9, "minimum": 0}}),
    ]
}

#[test]
fn what_ends_by_itself_is_valid() {
    let mut writer = Writer::new();
    let mut ended_of = Vec::new();
    for schema in schemas() {
        let grammar = grammar(schema.clone());
        let mut ended = 0;
        for seed in 0..8 {
            let (text, complete) = writer.write(&grammar, seed, 200);
            if !complete {
                let error = serde_json::from_str::<Value>(&text).unwrap_err();
                assert!(error.is_eof(), "{schema}, seed {seed}: the beginning of no JSON: {error}: {text}");
            } else {
                ended += 1;
                let value: Value = serde_json::from_str(&text)
                    .unwrap_or_else(|e| panic!("{schema}, seed {seed}: {e}: {text}"));
                assert!(admits(&schema, &value, &schema), "{schema}, seed {seed}: {text}");
            }
        }
        ended_of.push(ended);
    }
    // With free property names this model rarely ends.
    ended_of.pop();
    assert!(
        ended_of.iter().all(|n| *n > 0) && ended_of.iter().sum::<i32>() >= 24,
        "ended: {ended_of:?} of 8 each"
    );
}

#[test]
fn any_object_is_an_object() {
    let mut writer = Writer::new();
    let format = ResponseFormat::from_json(&json!({"type": "json_object"})).unwrap().grammar().unwrap();
    let mut ended = 0;
    for seed in 0..12 {
        let (text, complete) = writer.write(&format, seed, 200);
        assert!(text.trim_start().starts_with('{'), "{text}");
        match serde_json::from_str::<Value>(&text) {
            Ok(value) => assert!(complete && value.is_object(), "{text}"),
            Err(error) => assert!(!complete && error.is_eof(), "{error}: {text}"),
        }
        ended += u32::from(complete);
    }
    println!("{ended} of 12 ended");
}

#[test]
fn demanded_calls_are_made_and_read_back() {
    let mut writer = Writer::new();
    let parameters = schemas().remove(0);
    let tool = |name: &str, parameters: &Value| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    let tools = [tool("add_person", &parameters), tool("stop", &Value::Null)];
    let tools = tools_from_json(&tools).unwrap();
    let named = json!({"type": "function", "function": {"name": "add_person"}});
    let mut seen = std::collections::BTreeSet::new();
    for format in [ToolFormat::Llama3, ToolFormat::Hermes, ToolFormat::Pythonic, ToolFormat::Qwen3Coder] {
        for (choice, parallel) in
            [(json!("required"), true), (json!("required"), false), (named.clone(), false)]
        {
            let choice_value = choice.clone();
            let choice = ToolChoice::from_json(Some(&choice), &tools).unwrap();
            let grammar = choice.grammar(format, &tools, parallel).unwrap().unwrap();
            for seed in 0..16 {
                let (text, complete) = writer.write(&grammar, seed, 200);
                if !complete {
                    continue;
                }
                let (content, calls) = format.parse(&text, &tools);
                assert_eq!(content, "", "{format:?} {choice_value}: {text}");
                assert!(
                    calls.len() == 1 || (parallel && calls.len() > 1),
                    "{format:?} {choice_value}: {text}"
                );
                for call in calls {
                    let value: Value = serde_json::from_str(&call.arguments).unwrap();
                    match call.name.as_str() {
                        "add_person" => assert!(admits(&parameters, &value, &parameters), "{text}"),
                        "stop" => assert_eq!(value, json!({}), "{text}"),
                        other => panic!("{other} is no tool: {text}"),
                    }
                    assert!(choice != ToolChoice::Named("add_person".into()) || call.name == "add_person");
                    seen.insert((format!("{format:?}"), call.name));
                }
            }
        }
    }
    assert_eq!(seen.len(), 8, "{seen:?}");
}

/// A byte-level vocabulary of `tokens`, followed by two control tokens: `<tool_call>` and `<end>`.
fn small_tokenizer(tokens: &[&str]) -> (Tokenizer, Vec<u32>) {
    let byte_level = |t: &&str| t.replace(' ', "Ġ").replace('\n', "Ċ");
    let vocab: serde_json::Map<String, Value> =
        tokens.iter().map(byte_level).zip(0..).map(|(t, id)| (t, json!(id))).collect();
    let n = tokens.len();
    let control = |id: usize, content: &str| json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [control(n, "<tool_call>"), control(n + 1, "<end>")],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []}
    });
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
    (Tokenizer::from_folder(folder.path()).unwrap().unwrap(), vec![n as u32 + 1])
}

/// Every character that these schemas need, so that no path is a dead end, and tokens that cross the boundaries
/// of grammar parts.
const SMALL: [&str; 64] = [
    "{", "}", "[", "]", "\"", ":", ",", " ", "\n", "a", "b", "c", "1", "2", "0", "-", ".", "e", "\\", "null",
    "true", "fals", "\"a\"", "\":", "{\"", "\"}", ", ", "\",\"", "aa", "abc", "12", "[1", "]]", "bc\"",
    "\\\"", "u00", "name", "\"name", "< ", "</", "{}", "t", "r", "n", "u", "l", "s", "f", "d", "g", "m", "o",
    "x", "v", "k", "i", "3", "4", "5", "9", "E", "Ã", "©", "red\"",
];

fn allowed(constraint: &mut dyn kvist_engine::serving::Constraint, vocab: usize) -> Vec<bool> {
    let mut logits = vec![0.0; vocab];
    constraint.mask(&mut logits).unwrap();
    logits.iter().map(|l| l.is_finite()).collect()
}

/// The reference tries every token after the same history: a mask is correct if it allows exactly the tokens
/// that are accepted.
#[test]
fn masks_are_what_trying_every_token_gives() {
    let (tokenizer, end) = small_tokenizer(&SMALL);
    let vocab = SMALL.len() + 5; // logits without a token
    let grammars = GrammarCompiler::new(&tokenizer, vocab, &end).unwrap();
    let mut random = kvist_testing::SplitMix64(11);
    let mut steps = 0;
    for schema in schemas().into_iter().chain([json!({}), json!({"type": "string", "pattern": "^a(bc)*$"})]) {
        let compiled = grammars.compile(&grammar(schema.clone())).unwrap();
        for _ in 0..4 {
            let mut constraint = compiled.constraint();
            let mut history: Vec<u32> = Vec::new();
            for _ in 0..12 {
                let mask = allowed(constraint.as_mut(), vocab);
                for token in 0..vocab as u32 {
                    let mut fresh = compiled.constraint();
                    for &past in &history {
                        fresh.accept(past).unwrap();
                    }
                    let taken = fresh.accept(token).is_ok();
                    assert_eq!(
                        mask[token as usize],
                        taken,
                        "{schema}: {token} ({:?}) after {history:?}",
                        SMALL.get(token as usize)
                    );
                }
                let choices: Vec<u32> = (0..vocab as u32).filter(|t| mask[*t as usize]).collect();
                let token = random.pick(&choices);
                history.push(token);
                steps += 1;
                if constraint.accept(token).unwrap() {
                    break;
                }
            }
        }
    }
    assert!(steps > 150, "{steps} steps");
}

/// A finite language: a token is allowed if and only if some sentence continues with it, and the end token if
/// and only if a sentence is complete.
#[test]
fn masks_of_a_finite_language() {
    let (tokenizer, end) = small_tokenizer(&SMALL);
    let vocab = SMALL.len() + 2;
    let grammars = GrammarCompiler::new(&tokenizer, vocab, &end).unwrap();
    let values = json!(["a", "abc", "aa", "b\"c", "{}", 1, 12, 120, -1, null, true]);
    let sentences: Vec<String> = values.as_array().unwrap().iter().map(Value::to_string).collect();
    let compiled = grammars.compile(&grammar(json!({"enum": values}))).unwrap();
    let mut open = vec![Vec::<u32>::new()];
    let mut complete = 0;
    while let Some(history) = open.pop() {
        let mut constraint = compiled.constraint();
        let ended = history.iter().any(|token| constraint.accept(*token).unwrap());
        let text: String = history.iter().map(|token| SMALL[*token as usize]).collect();
        let longer = sentences.iter().any(|s| s.len() > text.len() && s.starts_with(&text));
        assert!(sentences.contains(&text) || longer, "{text}");
        assert_eq!(ended, !longer, "{text}");
        if ended {
            complete += 1;
            continue;
        }
        let mask = allowed(constraint.as_mut(), vocab);
        for (token, word) in SMALL.iter().enumerate() {
            let next = format!("{text}{word}");
            let expected = sentences.iter().any(|s| s.starts_with(&next));
            assert_eq!(mask[token], expected, "{word} after {text}");
            if expected {
                open.push([history.as_slice(), &[token as u32]].concat());
            }
        }
        assert!(!mask[SMALL.len()], "<tool_call> after {text}");
        assert_eq!(mask[end[0] as usize], sentences.contains(&text), "the end after {text}");
    }
    assert!(complete > sentences.len(), "{complete} ways through {} sentences", sentences.len());
}

/// Regression: a model that prefers whitespace could write 64 blanks between any two JSON tokens until its
/// limit.
#[test]
fn a_model_that_prefers_blanks_comes_to_an_end() {
    let (tokenizer, end) = small_tokenizer(&SMALL);
    let vocab = SMALL.len() + 2;
    let grammars = GrammarCompiler::new(&tokenizer, vocab, &end).unwrap();
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["a", "b"], "properties": {
        "a": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "minItems": 2}, "b": {"enum": ["x"]},
    }});
    let compiled = grammars.compile(&grammar(schema)).unwrap();
    for favourite in [[" ", "\n"], ["\n", " "]] {
        let mut constraint = compiled.constraint();
        let (mut text, mut ended) = (String::new(), false);
        for _ in 0..600 {
            let mask = allowed(constraint.as_mut(), vocab);
            let of = |word: &&str| SMALL.iter().position(|other| other == word).filter(|at| mask[*at]);
            let token =
                favourite.iter().find_map(of).or_else(|| mask.iter().position(|allowed| *allowed)).unwrap();
            text += SMALL.get(token).unwrap_or(&"");
            ended = constraint.accept(token as u32).unwrap();
            if ended {
                break;
            }
        }
        assert!(ended, "{} bytes of which {:?}", text.len(), text.trim());
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((value["a"].as_array().unwrap().len(), &value["b"]), (2, &json!("x")));
        assert!(text.len() < 400, "{} bytes", text.len());
    }
}

/// Ordinary pretty-printed JSON is accepted by the grammar.
#[test]
fn usual_json_is_taken() {
    let writer = Writer::new();
    let tokenizer = writer.model.tokenizer().unwrap();
    let schema =
        json!({"type": "object", "required": ["a"], "properties": {"a": {"type": "array"}, "b": {}}});
    let value = json!({"a": [1, {"c": [[true], {"d": {"e": []}}]}, "x y"], "b": {"f": null}});
    let indented = |indent: &str| {
        let mut out = Vec::new();
        let formatter = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
        let mut serializer = serde_json::Serializer::with_formatter(&mut out, formatter);
        serde::Serialize::serialize(&value, &mut serializer).unwrap();
        String::from_utf8(out).unwrap()
    };
    let spaced = r#"{"a": [1, {"c": [[true], {"d": {"e": []}}]}, "x y"], "b": {"f": null}}"#.to_string();
    let texts = [
        value.to_string(),
        spaced,
        indented("  "),
        indented("    "),
        indented("\t"),
        indented("  ").replace('\n', "\r\n"),
    ];
    for text in texts {
        let mut constraint = writer.grammars.compile(&grammar(schema.clone())).unwrap().constraint();
        for token in tokenizer.encode(&text, false).unwrap() {
            constraint.accept(token).unwrap_or_else(|e| panic!("{e} in {text}"));
        }
    }
}

/// Large numbers that are not refused are enforced to the last digit.
#[test]
fn large_numbers_are_exact() {
    let writer = Writer::new();
    let tokenizer = writer.model.tokenizer().unwrap();
    let big = |from: i64, to: u64| json!({"type": "integer", "minimum": from, "maximum": to});
    for (schema, text, expected) in [
        (json!({"const": 1_i64 << 53}), "9007199254740992", true),
        (
            json!({"enum": [{"id": [4611686018427387904_i64]}, -9007199254740994_i64]}),
            "-9007199254740994",
            true,
        ),
        (json!({"enum": [{"id": [4611686018427387904_i64]}]}), r#"{"id":[4611686018427387904]}"#, true),
        (json!({"type": "integer", "const": 1e18}), "1000000000000000000", true),
        (big(1 << 60, 1 << 62), "1152921504606846976", true),
        (big(1 << 60, 1 << 62), "1152921504606846975", false),
        (big(1 << 60, 1 << 62), "4611686018427387905", false),
        (big(0, i64::MAX as u64), "9223372036854775807", true),
        (big(0, i64::MAX as u64), "9223372036854775808", false),
        (big(0, u64::MAX), "9223372036854775807", true),
    ] {
        let mut constraint = writer.grammars.compile(&grammar(schema.clone())).unwrap().constraint();
        let tokens = tokenizer.encode(text, false).unwrap();
        let taken = tokens.iter().all(|token| constraint.accept(*token).is_ok());
        assert_eq!(taken, expected, "{text} for {schema}");
    }
}

/// Regression: the grammar treated `oneOf` as `anyOf`, so an answer could match two alternatives.
#[test]
fn one_of_admits_what_one_alternative_admits() {
    let (tokenizer, end) = small_tokenizer(&SMALL);
    let grammars = GrammarCompiler::new(&tokenizer, SMALL.len() + 2, &end).unwrap();
    let kind = |kind: Value| json!({"type": "object", "properties": {"a": {"const": kind}, "b": {"type": "integer"}}, "required": ["a"], "additionalProperties": false});
    let apart = json!({"oneOf": [kind(json!(1)), kind(json!("x")), {"type": "null"}]});
    grammars.compile(&grammar(apart.clone())).unwrap();
    let beside = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
        "oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}]});
    grammars.compile(&grammar(beside)).unwrap();
    let overlapping =
        json!({"type": "object", "properties": {"x": {"oneOf": [kind(json!(1)), {"type": "object"}]}}});
    let error = grammars.compile(&grammar(overlapping)).unwrap_err();
    assert_eq!(error.param, "response_format.json_schema.schema.properties.x.oneOf");
    let mut writer = Writer::new();
    let mut ended = 0;
    for seed in 0..6 {
        let (text, complete) = writer.write(&grammar(apart.clone()), seed, 120);
        if complete {
            let value: Value = serde_json::from_str(&text).unwrap();
            let ways = apart["oneOf"].as_array().unwrap();
            assert_eq!(ways.iter().filter(|way| admits(way, &value, &apart)).count(), 1, "{text}");
            ended += 1;
        }
    }
    assert!(ended > 0);
}

/// Schemas that these formats cannot enforce are rejected with their path; the others are enforced.
#[test]
fn schemas_of_arguments_that_are_written_one_by_one() {
    let (tokenizer, end) = small_tokenizer(&SMALL);
    let grammars = GrammarCompiler::new(&tokenizer, SMALL.len() + 2, &end).unwrap();
    let tool = |parameters: Value| {
        tools_from_json(&[json!({"type": "function", "function": {"name": "f", "parameters": parameters}})])
            .unwrap()
    };
    let of = |a: Value| json!({"type": "object", "properties": {"a": a}, "required": ["a"], "$defs": {"s": {"type": "string"}}});
    use ToolFormat::{Pythonic, Qwen3Coder};
    for (format, parameters) in [
        (Pythonic, of(json!({"type": "string", "pattern": "^a$"}))),
        (Pythonic, of(json!({"$ref": "#/$defs/s"}))),
        (Pythonic, json!({})),
        (Pythonic, json!({"type": "object", "properties": {"a": {}, "b": false, "c": true}})),
        (Qwen3Coder, of(json!({"$ref": "#/$defs/s"}))),
        (Qwen3Coder, of(json!({"anyOf": [{"type": "string"}, {"type": "null"}], "default": null}))),
        (Qwen3Coder, of(json!({"enum": ["a", "b", null]}))),
        (Qwen3Coder, of(json!({"type": "string", "minLength": 2, "maxLength": 4}))),
        (Qwen3Coder, of(json!({"type": "array", "items": {"type": "string", "pattern": "^a$"}}))),
        (Qwen3Coder, json!({})),
    ] {
        let grammar = ToolChoice::Required.grammar(format, &tool(parameters.clone()), true);
        let grammar = grammar.unwrap_or_else(|e| panic!("{format:?} {parameters}: {e}")).unwrap();
        grammars.compile(&grammar).unwrap_or_else(|e| panic!("{format:?} {parameters}: {e}"));
    }
    for (format, parameters, place) in [
        (Pythonic, json!({"type": "object", "anyOf": [{}]}), ".anyOf"),
        (Pythonic, json!({"type": "object", "minProperties": 1}), ".minProperties"),
        (Pythonic, json!({"type": "object", "required": ["b"]}), ".required"),
        (Pythonic, json!({"type": "object", "properties": {"a b": {}}}), ".properties.a b"),
        (Pythonic, of(json!({"items": {"$ref": "#"}})), ".properties.a"),
        (Pythonic, of(json!({"not": {}})), ".properties.a.not"),
        (Pythonic, of(json!(false)), ".properties.a"),
        (Qwen3Coder, json!({"type": "object", "properties": {"a>": {}}}), ".properties.a>"),
        (Qwen3Coder, of(json!({"type": "string", "pattern": "^a$"})), ".properties.a"),
        (Qwen3Coder, of(json!({"type": ["string", "integer"], "maximum": 3})), ".properties.a"),
        (Qwen3Coder, of(json!({"enum": ["a", 1]})), ".properties.a"),
        (Qwen3Coder, of(json!({"enum": ["</parameter>"]})), ".properties.a"),
    ] {
        let error = ToolChoice::Required.grammar(format, &tool(parameters.clone()), true).unwrap_err();
        assert_eq!(
            error.param,
            format!("tools[0].function.parameters{place}"),
            "{format:?} {parameters}: {error}"
        );
    }
}

/// If `<tool_call>` is a control token, a required call must begin with that token.
#[test]
fn a_mark_that_is_a_control_token_is_taken_as_one() {
    let (tokenizer, end) = small_tokenizer(&SMALL);
    let vocab = SMALL.len() + 2;
    let grammars = GrammarCompiler::new(&tokenizer, vocab, &end).unwrap();
    let tools = tools_from_json(&[json!({"type": "function", "function": {"name": "abc"}})]).unwrap();
    let grammar = ToolChoice::Required.grammar(ToolFormat::Hermes, &tools, false).unwrap().unwrap();
    let mut constraint = grammars.compile(&grammar).unwrap().constraint();
    let first: Vec<usize> =
        allowed(constraint.as_mut(), vocab).iter().enumerate().filter(|(_, a)| **a).map(|(t, _)| t).collect();
    assert_eq!(first, [SMALL.len()]);
    assert!(!constraint.accept(SMALL.len() as u32).unwrap());
    let next = allowed(constraint.as_mut(), vocab);
    assert!(next[8] && next.iter().filter(|a| **a).count() == 1, "a line break comes next");
    // `stream_with` writes the control token as text, for the tool call parser.
    let mut text = tokenizer.stream_with(&[SMALL.len() as u32]);
    assert_eq!(text.push(SMALL.len() as u32).unwrap() + &text.push(8).unwrap(), "<tool_call>\n");
}

/// Without an end token in the vocabulary, the text ends when the grammar is complete.
#[test]
fn without_an_end_token_the_grammar_ends_the_text() {
    let (tokenizer, _) = small_tokenizer(&SMALL);
    let grammars = GrammarCompiler::new(&tokenizer, SMALL.len() + 2, &[]).unwrap();
    let compiled = grammars.compile(&grammar(json!({"enum": [1, 12, [1]]}))).unwrap();
    let id = |word: &str| SMALL.iter().position(|w| *w == word).unwrap() as u32;
    assert!(compiled.constraint().accept(id("1")).unwrap());
    let mut list = compiled.constraint();
    assert!(!list.accept(id("[1")).unwrap());
    assert!(list.accept(id("]")).unwrap());
}

/// Each schema must be compiled or rejected soon, and then either give masks in bounded time or end in an
/// error.
#[test]
fn hostile_schemas_neither_hang_nor_crash() {
    let (tokenizer, end) = small_tokenizer(&SMALL);
    let vocab = SMALL.len() + 2;
    let grammars = GrammarCompiler::new(&tokenizer, vocab, &end).unwrap();
    let any_of = |n: usize, at: usize| -> Value {
        let options = (0..n).map(|i| json!({"properties": {format!("p{at}_{i}"): {"type": "integer"}}, "required": [format!("p{at}_{i}")]}));
        json!({"anyOf": options.collect::<Vec<_>>()})
    };
    let chain = |n: usize| -> Value {
        let defs: serde_json::Map<String, Value> =
            (0..n).map(|i| (i.to_string(), json!({"$ref": format!("#/$defs/{}", (i + 1) % n)}))).collect();
        json!({"$ref": "#/$defs/0", "$defs": defs})
    };
    let mut long_chain = chain(2000);
    long_chain["$defs"]["1999"] = json!({"type": "null"});
    let mut refs_with_siblings = json!({"$defs": {"a": {"type": "object", "properties": {"x": {"$ref": "#/$defs/b"}}, "allOf": [{"$ref": "#/$defs/b"}]}, "b": {"type": "object", "allOf": [{"$ref": "#/$defs/a"}]}}});
    refs_with_siblings["$ref"] = json!("#/$defs/a");
    let pattern = |p: &str| json!({"type": "string", "pattern": p});
    let table = [
        ("itself", json!({"$ref": "#"})),
        ("itself in allOf", json!({"allOf": [{"$ref": "#"}]})),
        ("a circle", chain(3)),
        ("a long circle", chain(2000)),
        ("a long chain", long_chain),
        ("a circle with siblings", refs_with_siblings),
        ("a product of alternatives", json!({"allOf": (0..12).map(|at| any_of(6, at)).collect::<Vec<_>>()})),
        ("many alternatives", any_of(400, 0)),
        ("a large enum", json!({"enum": (0..6000).map(|n| format!("v{n}")).collect::<Vec<_>>()})),
        ("nested repetition", pattern("^((a{1,200}){1,200}){1,200}$")),
        ("ambiguous repetition", pattern("(a|aa|aaa|b)*(a|b){50}(a|c){50}$")),
        ("many wildcards", pattern("(.*a.*){30}")),
        ("an unbalanced pattern", pattern("(a")),
        ("a pattern that looks back", pattern("(a)\\1")),
        ("huge bounds", json!({"type": "string", "minLength": 4_000_000_000_u32})),
        (
            "huge lists",
            json!({"type": "array", "minItems": 4_000_000_000_u32, "items": {"type": "array", "minItems": 1_000_000_000}}),
        ),
        (
            "many optional properties",
            json!({"type": "object", "properties": (0..1500).map(|n| (format!("k{n}"), json!({}))).collect::<serde_json::Map<_, _>>()}),
        ),
        ("tiny steps", json!({"type": "number", "multipleOf": 1e-300})),
        (
            "large steps",
            json!({"type": "integer", "multipleOf": 4_000_000_007_u64, "minimum": -1e300, "maximum": 1e300}),
        ),
        ("overlapping patterns", json!({"type": "object", "patternProperties": {"^a": {}, "a$": {}}})),
        ("nothing", json!({"type": "integer", "minimum": 5, "maximum": 4})),
        ("an unknown format", json!({"type": "string", "format": "telepathy"})),
        ("long umlauts", json!({"const": "é".repeat(500), "minLength": "é".repeat(99)})),
        ("umlauts cut", json!({"type": "string", "format": format!("{}é", "x".repeat(99))})),
    ];
    for (name, schema) in table {
        let started = Instant::now();
        let compiled = grammars.compile(&grammar(schema));
        let took = started.elapsed();
        assert!(took < PATIENCE, "{name}: {took:?} to compile");
        let compiled = match compiled {
            Ok(compiled) => compiled,
            Err(error) => {
                println!("{name}: {took:?}: {error}");
                assert!(
                    !error.problem.contains("<state>") && !error.problem.contains("backtrace"),
                    "{error}"
                );
                assert!(error.param.starts_with("response_format.json_schema.schema"), "{name}: {error}");
                continue;
            }
        };
        let mut constraint = compiled.constraint();
        let (mut slowest, mut ended) = (Duration::ZERO, "still going".to_string());
        for step in 0..60_u32 {
            let started = Instant::now();
            let mut logits = vec![0.0; vocab];
            let masked = constraint.mask(&mut logits);
            slowest = slowest.max(started.elapsed());
            if let Err(error) = masked {
                ended = error;
                break;
            }
            let choices: Vec<u32> = (0..vocab as u32).filter(|t| logits[*t as usize].is_finite()).collect();
            match constraint.accept(choices[step as usize * 7 % choices.len()]) {
                Ok(false) => {}
                Ok(true) => {
                    ended = "complete".into();
                    break;
                }
                Err(error) => {
                    ended = error;
                    break;
                }
            }
        }
        println!("{name}: {took:?}, masks up to {slowest:?}, {ended}");
        assert!(slowest < PATIENCE, "{name}: a mask took {slowest:?}");
    }
}

/// Prints how long usual schemas take.
#[test]
fn usual_schemas_are_quick() {
    let mut writer = Writer::new();
    for schema in schemas() {
        let grammar = grammar(schema);
        let started = Instant::now();
        let compiled = writer.grammars.compile(&grammar).unwrap();
        let compile = started.elapsed();
        let started = Instant::now();
        let _constraint = compiled.constraint();
        println!("compiled in {compile:?}, copied in {:?}", started.elapsed());
        assert!(compile < PATIENCE, "{compile:?}");
    }
    let (_, _) = writer.write(&grammar(schemas().remove(0)), 0, 8);
}

/// The error names the tool whose schema cannot be compiled.
#[test]
fn errors_name_the_tool() {
    let (tokenizer, end) = small_tokenizer(&SMALL);
    let grammars = GrammarCompiler::new(&tokenizer, SMALL.len() + 2, &end).unwrap();
    let tool = |name: &str, of: Value| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"x": of}, "required": ["x"]}}});
    let tools =
        [tool("a", json!({})), tool("b", json!({"type": "string", "pattern": "(a"})), tool("c", json!({}))];
    let tools = tools_from_json(&tools).unwrap();
    let grammar = ToolChoice::Required.grammar(ToolFormat::Hermes, &tools, true).unwrap().unwrap();
    let error = grammars.compile(&grammar).unwrap_err();
    assert_eq!(error.param, "tools[1].function.parameters");
    assert!(error.problem.contains("unclosed group") && !error.problem.contains("x-guidance"), "{error}");
}

/// Regression: each schema had its own budget for comparing alternatives, so a request with a hundred tools
/// could use a hundred budgets.
#[test]
fn all_schemas_of_a_request_share_their_steps() {
    let (tokenizer, end) = small_tokenizer(&SMALL);
    let grammars = GrammarCompiler::new(&tokenizer, SMALL.len() + 2, &end).unwrap();
    let way =
        |at: usize| json!({"anyOf": (0..34).map(|n| json!({"const": at * 34 + n})).collect::<Vec<_>>()});
    let defs: serde_json::Map<String, Value> = (0..64).map(|at| (at.to_string(), way(at))).collect();
    let refs: Vec<Value> = (0..6).map(|at| json!({"$ref": format!("#/$defs/{at}")})).collect();
    let x = json!({"type": "array", "prefixItems": vec![json!({"oneOf": refs}); 4]});
    let parameters = json!({"type": "object", "$defs": defs, "properties": {"x": x}});
    let demanded = |format: ToolFormat, n: usize| {
        let tool = |at: usize| json!({"type": "function", "function": {"name": format!("f{at}"), "parameters": parameters}});
        let tools = tools_from_json(&(0..n).map(tool).collect::<Vec<_>>()).unwrap();
        let grammar = ToolChoice::Required.grammar(format, &tools, true)?;
        grammars.compile(&grammar.unwrap())
    };
    for (format, several) in [(ToolFormat::Hermes, 6), (ToolFormat::Pythonic, 6), (ToolFormat::Qwen3Coder, 6)]
    {
        demanded(format, 1).unwrap();
        let error = demanded(format, several).unwrap_err();
        assert!(error.param.starts_with("tools[") && !error.param.starts_with("tools[0]"), "{error}");
        assert!(error.param.ends_with(".oneOf") && error.problem.contains("steps"), "{error}");
    }
}
