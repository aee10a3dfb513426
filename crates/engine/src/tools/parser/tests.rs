//! Tests the parser with tables of answers, whole and cut into pieces.
use super::super::reparse::SHORT_BYTES;
use super::*;

fn cut(format: ToolFormat, pieces: &[&str]) -> (String, Vec<ToolCall>) {
    let (mut parser, mut out) = (ToolParser::new(format, true, tools().into()), Vec::new());
    pieces.iter().for_each(|piece| parser.push(piece, &mut out));
    parser.finish(&mut out);
    let (mut content, mut calls) = (String::new(), Vec::new());
    for delta in out {
        match delta {
            ToolDelta::Content(text) => content += &text,
            ToolDelta::Call { index, call } => {
                assert_eq!(index, calls.len());
                calls.push(call);
            }
            ToolDelta::Reasoning(text) => panic!("{text:?} is thought"),
        }
    }
    (content, calls)
}

fn call(name: &str, arguments: &str) -> ToolCall {
    ToolCall { name: name.into(), arguments: arguments.into() }
}

use ToolFormat::{Hermes, Llama3, Pythonic, Qwen3Coder};

fn tools() -> Vec<Tool> {
    let tool = serde_json::json!({"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}}});
    super::super::tools_from_json(&[tool]).unwrap()
}

/// (format, answer, its text, its calls)
type Row = (ToolFormat, &'static str, &'static str, &'static [(&'static str, &'static str)]);
const TABLE: &[Row] = &[
    (Hermes, "", "", &[]),
    (Hermes, " \n", " \n", &[]),
    (Hermes, "Just text, 1 < 2.", "Just text, 1 < 2.", &[]),
    (
        Hermes,
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>",
        "",
        &[("f", r#"{"a": 1}"#)],
    ),
    (
        Hermes,
        "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"arguments\": {\"é\": [\"x\"]}, \"name\": \"g\"}\n</tool_call>\n",
        "Let me see.\n",
        &[("f", "{}"), ("g", r#"{"é": ["x"]}"#)],
    ),
    // The closing mark inside a string, numbers larger than any machine integer, arguments as a string, no
    // arguments.
    (
        Hermes,
        r#"<tool_call>{"name": "f", "arguments": {"a": "</tool_call>}\""}}</tool_call>"#,
        "",
        &[("f", r#"{"a": "</tool_call>}\""}"#)],
    ),
    (
        Hermes,
        r#"<tool_call>{"name":"f","arguments":{"n":123456789012345678901234567890}}</tool_call>"#,
        "",
        &[("f", r#"{"n":123456789012345678901234567890}"#)],
    ),
    (
        Hermes,
        r#"<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>"#,
        "",
        &[("f", r#"{"a": 1}"#)],
    ),
    (Hermes, r#"<tool_call>{"name": "f"}</tool_call>"#, "", &[("f", "{}")]),
    (Hermes, r#"<tool_call>{"name": "f", "parameters": {}}</tool_call> done"#, "done", &[("f", "{}")]),
    // Cut off by the token limit: a complete object is a call, an incomplete one is text.
    (Hermes, r#"<tool_call>{"name": "f", "arguments": {}}"#, "", &[("f", "{}")]),
    (Hermes, r#"<tool_call>{"name": "f", "arguments": {}}</tool"#, "", &[("f", "{}")]),
    (Hermes, r#"a <tool_call>{"name": "f", "argum"#, r#"a <tool_call>{"name": "f", "argum"#, &[]),
    (Hermes, "a <tool_ca", "a <tool_ca", &[]),
    // Not calls; the text is returned unchanged.
    (Hermes, "<tool_call>hello</tool_call>", "<tool_call>hello</tool_call>", &[]),
    (Hermes, "<tool_call>{\"name\": 1}</tool_call>!", "<tool_call>{\"name\": 1}</tool_call>!", &[]),
    (Hermes, "<tool_call>{\"name\": \"f\",}</tool_call>", "<tool_call>{\"name\": \"f\",}</tool_call>", &[]),
    (
        Hermes,
        r#"<tool_call>{"name": "f", "arguments": [1]}</tool_call>"#,
        r#"<tool_call>{"name": "f", "arguments": [1]}</tool_call>"#,
        &[],
    ),
    (Hermes, r#"<tool_call>{"name": "f"} x</tool_call>"#, r#"<tool_call>{"name": "f"} x</tool_call>"#, &[]),
    // An unused mark does not hide the next one.
    (Hermes, r#"<tool_call><tool_call>{"name": "f"}</tool_call>"#, "<tool_call>", &[("f", "{}")]),
    (Hermes, r#"<<tool_call>{"name": "f"}</tool_call>"#, "<", &[("f", "{}")]),
    (Hermes, r#"{"name": "f", "arguments": {}}"#, r#"{"name": "f", "arguments": {}}"#, &[]),
    (Llama3, r#"{"name": "f", "parameters": {"a": 1}}"#, "", &[("f", r#"{"a": 1}"#)]),
    (Llama3, "\n {\"name\": \"f\", \"parameters\": {}}\n", "", &[("f", "{}")]),
    (Llama3, r#"{"type": "function", "name": "f", "parameters": {}}"#, "", &[("f", "{}")]),
    (Llama3, r#"<|python_tag|>{"name": "f", "arguments": {}}"#, "", &[("f", "{}")]),
    (
        Llama3,
        r#"{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": "}"}}"#,
        "",
        &[("f", "{}"), ("g", r#"{"x": "}"}"#)],
    ),
    (Llama3, r#"I look. <|python_tag|>{"name": "f", "parameters": {}}"#, "I look. ", &[("f", "{}")]),
    (Llama3, r#"{"name": "f", "parameters": {}} That was it."#, "That was it.", &[("f", "{}")]),
    // Answers in JSON or Python are text.
    (Llama3, r#" {"name": "Bob", "age": 3}"#, r#" {"name": "Bob", "age": 3}"#, &[]),
    (Llama3, "<|python_tag|>print(1)", "<|python_tag|>print(1)", &[]),
    (Llama3, r#"{"name": "f", "parameters": {"#, r#"{"name": "f", "parameters": {"#, &[]),
    (Llama3, r#"See {"name": "f", "parameters": {}}"#, r#"See {"name": "f", "parameters": {}}"#, &[]),
    (Llama3, r#"{"name": "", "parameters": {}}"#, r#"{"name": "", "parameters": {}}"#, &[]),
    (Llama3, "<|python", "<|python", &[]),
    (Pythonic, "", "", &[]),
    (Pythonic, "[f()]", "", &[("f", "{}")]),
    (
        Pythonic,
        "\n[get_weather(city=\"Paris, ]\", days=3), g(a=[1, {'b': None}])]\n",
        "",
        &[("get_weather", r#"{"city": "Paris, ]", "days": 3}"#), ("g", r#"{"a": [1, {"b": null}]}"#)],
    ),
    (Pythonic, "<|python_start|>[f(a=True)]<|python_end|>", "", &[("f", r#"{"a": true}"#)]),
    (Pythonic, "<|python_start|> [f()] \n<|python_end|>\nDone.", "Done.", &[("f", "{}")]),
    (Pythonic, "I look. <|python_start|>[f()]<|python_e", "I look. ", &[("f", "{}")]),
    (Pythonic, "[f()] [g()]", "", &[("f", "{}"), ("g", "{}")]),
    // Lists, links, code and incomplete calls are text.
    (Pythonic, "[1, 2]", "[1, 2]", &[]),
    (Pythonic, "[f()", "[f()", &[]),
    (Pythonic, "[f(a='x", "[f(a='x", &[]),
    (Pythonic, "[f(a=g())]", "[f(a=g())]", &[]),
    (Pythonic, "[the docs](https://a.b) say", "[the docs](https://a.b) say", &[]),
    (Pythonic, "See [f()]", "See [f()]", &[]),
    (Pythonic, "<|python_start|>print(1)<|python_end|>", "<|python_start|>print(1)<|python_end|>", &[]),
    (
        Qwen3Coder,
        "<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n<parameter=s>\n3\n</parameter>\n</function>\n</tool_call>",
        "",
        &[("f", r#"{"n": 3, "s": "3"}"#)],
    ),
    (
        Qwen3Coder,
        "Let me.\n<tool_call>\n<function=f>\n<parameter=s>\nif a < b:\n\treturn \"</tool_call>\"\n\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        "Let me.\n",
        &[("f", r#"{"s": "if a < b:\n\treturn \"</tool_call>\"\n"}"#), ("g", "{}")],
    ),
    // The outer marks may be missing or cut off.
    (Qwen3Coder, "<function=f><parameter=n>1</parameter></function>", "", &[("f", r#"{"n": 1}"#)]),
    (Qwen3Coder, "<tool_call><function=f></function></tool", "", &[("f", "{}")]),
    (Qwen3Coder, "<tool_call><function=f></function> x", "x", &[("f", "{}")]),
    (Qwen3Coder, "<tool_call><function=f></function", "<tool_call><function=f></function", &[]),
    (
        Qwen3Coder,
        "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>",
        &[],
    ),
    (Qwen3Coder, "<tool_call><tool_call><function=f></function>", "<tool_call>", &[("f", "{}")]),
    (Qwen3Coder, "<function=>", "<function=>", &[]),
    (Qwen3Coder, "<function=a b></function>", "<function=a b></function>", &[]),
    (Qwen3Coder, "1 <function", "1 <function", &[]),
    (Qwen3Coder, "<function=f>oops</function>", "<function=f>oops</function>", &[]),
];

#[test]
fn answers_are_taken_apart() {
    for (format, answer, text, calls) in TABLE {
        let calls: Vec<_> = calls.iter().map(|(n, a)| call(n, a)).collect();
        assert_eq!(format.parse(answer, &tools()), (text.to_string(), calls), "{format:?}: {answer}");
    }
}

#[test]
fn cuts_change_nothing() {
    for (format, answer, ..) in TABLE {
        let whole = format.parse(answer, &tools());
        let letters: Vec<String> = answer.chars().map(String::from).collect();
        let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
        assert_eq!(cut(*format, &letters), whole, "{format:?} by letters: {answer}");
        for at in (0..answer.len()).filter(|at| answer.is_char_boundary(*at)) {
            let (a, b) = answer.split_at(at);
            assert_eq!(cut(*format, &[a, b]), whole, "{format:?} at {at}: {answer}");
        }
    }
}

/// Random answers made of fragments of calls, split at random.
#[test]
fn random_cuts_of_random_answers_change_nothing() {
    const BITS: [&str; 44] = [
        "<|python_start|>",
        "<|python_end|>",
        "[f(a=1)]",
        "[f(), g(s=']')]",
        "[f(",
        "f(",
        ")]",
        "a=",
        "'",
        ",",
        "[",
        "]",
        "<function=f>",
        "</function>",
        "<parameter=n>",
        "<parameter=s>",
        "</parameter>",
        "<function=f>\n<parameter=n>\n12\n</parameter>\n</function>\n",
        "<func",
        "\\x4",
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "{\"name\": \"f\", \"arguments\": {}}",
        "{\"name\": \"g\", \"parameters\": {\"a\": \"</tool_call>\"}}",
        "{\"name\": \"h\"}",
        "{",
        "}",
        "\"",
        " ",
        "\n",
        ";",
        "<",
        ">",
        "</",
        "tool_call",
        "name",
        ":",
        "\\",
        "é",
        "text ",
        "<|",
        "[1, 2]",
        "null",
    ];
    let seed: u64 = std::env::var("KVIST_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(7);
    let mut state = seed;
    let mut below = |n: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) as usize) % n
    };
    let tools = tools();
    let mut found = 0;
    for round in 0..20_000 {
        let answer: String = (0..below(12)).map(|_| BITS[below(BITS.len())]).collect();
        let format = [Hermes, Llama3, Pythonic, Qwen3Coder][below(4)];
        let whole = format.parse(&answer, &tools);
        found += whole.1.len();
        let mut pieces = Vec::new();
        let mut rest = answer.as_str();
        while !rest.is_empty() {
            let ends: Vec<usize> = rest.char_indices().map(|(at, c)| at + c.len_utf8()).collect();
            let (piece, after) = rest.split_at(ends[below(ends.len().min(9))]);
            pieces.push(piece);
            rest = after;
        }
        assert_eq!(
            cut(format, &pieces),
            whole,
            "seed {seed}, round {round}, {format:?}: {answer:?} as {pieces:?}"
        );
        // No text is invented, and without calls no text is lost.
        if whole.1.is_empty() {
            assert_eq!(whole.0, answer, "seed {seed}, round {round}, {format:?}");
        }
    }
    assert!(found > 1000, "only {found} calls in all answers");
}

#[test]
fn text_is_not_held_back_without_need() {
    let (mut parser, mut out) = (ToolParser::new(Hermes, true, Arc::default()), Vec::new());
    let mut push = |piece: &str| {
        parser.push(piece, &mut out);
        std::mem::take(&mut out)
    };
    let content = |text: &str| vec![ToolDelta::Content(text.into())];
    assert_eq!(push("Hello"), content("Hello"));
    assert_eq!(push(" <"), content(" "));
    assert_eq!(push("b> <tool_"), content("<b> "));
    assert_eq!(push("x"), content("<tool_x"));
    assert_eq!(push("<tool_call>{\"name\": \"f\""), []);
    assert_eq!(push("}\n"), []);
    assert_eq!(push("</tool_call>"), [ToolDelta::Call { index: 0, call: call("f", "{}") }]);
    assert_eq!(push("\n"), []);
    // Text that cannot become a call any more is returned at once, not at the end.
    assert_eq!(push("<tool_call>{oops}"), content("<tool_call>{oops}"));
}

#[test]
fn one_call_where_one_is_asked_for() {
    let (mut parser, mut out) = (ToolParser::new(Llama3, false, Arc::default()), Vec::new());
    parser.push(r#"{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}"#, &mut out);
    parser.finish(&mut out);
    assert_eq!(out, [ToolDelta::Call { index: 0, call: call("f", "{}") }]);
    assert_eq!(parser.calls(), 1);
}

/// Regression: every bracket of a nested list caused the whole call to be parsed again, which took seconds
/// for a long answer.
#[test]
fn long_calls_are_not_read_again_with_every_bracket() {
    let (lists, objects) = ("[1],".repeat(20_000), "{},".repeat(20_000));
    for (format, answer, arguments) in [
        (Pythonic, format!("[f(a=[{lists}])]"), format!("{{\"a\": [{}]}}", ["[1]"; 20_000].join(", "))),
        (
            Hermes,
            format!("<tool_call>{{\"name\": \"f\", \"arguments\": {{\"a\": [{objects}{{}}]}}}}</tool_call>"),
            format!("{{\"a\": [{objects}{{}}]}}"),
        ),
    ] {
        let (mut parser, mut out) = (ToolParser::new(format, true, Arc::default()), Vec::new());
        let (mut read_bytes, mut last) = (0, 0);
        for piece in answer.split_inclusive([']', '}']) {
            parser.push(piece, &mut out);
            if parser.last_parse.0 != last {
                last = parser.last_parse.0;
                read_bytes += last;
            }
        }
        parser.finish(&mut out);
        assert_eq!(out, [ToolDelta::Call { index: 0, call: call("f", &arguments) }]);
        let bound = 9 * answer.len() + SHORT_BYTES * SHORT_BYTES;
        assert!(read_bytes < bound, "{format:?}: {read_bytes} of {}", answer.len());
    }
}
