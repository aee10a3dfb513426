//! Conversations with tools, rendered as transformers renders them; the choice of the template, and refused input.
use kvist_model::Error;
use kvist_model::template::{ChatTemplate, Conversation};
use kvist_model::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/templates")
}

fn tokenizer() -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [], "pre_tokenizer": null, "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "fuse_unk": false, "byte_fallback": false, "vocab": {"<s>": 0, "</s>": 1}, "merges": []}
    });
    std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
    let config = r#"{"bos_token": "<s>", "eos_token": "</s>"}"#;
    std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
    Tokenizer::from_folder(folder.path()).unwrap().unwrap()
}

fn read(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(fixtures().join(name)).unwrap()).unwrap()
}

fn render(template: &ChatTemplate, request: &Value) -> Result<String, Error> {
    let list = |key: &str| request[key].as_array().cloned().unwrap_or_default();
    let (messages, tools) = (list("messages"), list("tools"));
    let kwargs = request["kwargs"].as_object().cloned().unwrap_or_default();
    let conversation = Conversation {
        messages: &messages,
        tools: &tools,
        add_generation_prompt: request["prompt"].as_bool().unwrap_or(true),
        kwargs: &kwargs,
    };
    template.render_conversation(&conversation, &tokenizer())
}

#[test]
fn conversations_are_rendered_as_transformers_renders_them() {
    let (conversations, expected) = (read("conversations.json"), read("expected.json"));
    let mut bad = Vec::new();
    let mut n = 0;
    for (name, texts) in expected.as_object().unwrap() {
        let source = std::fs::read_to_string(fixtures().join(format!("{name}.jinja"))).unwrap();
        let template = ChatTemplate::new(name, &source).unwrap();
        for (title, text) in texts.as_object().unwrap() {
            n += 1;
            let rendered = render(&template, &conversations[title]);
            match (text.as_str(), &rendered) {
                (Some(text), Ok(rendered)) if rendered == text => {}
                (None, Err(Error::Template { .. })) => {}
                _ => bad.push(format!("{name}, {title}: {rendered:?} instead of {text:?}")),
            }
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
    assert!(n >= 30, "{n} conversations");
}

fn text(messages: Value, tools: Value, template: &ChatTemplate) -> Result<String, Error> {
    render(template, &json!({"messages": messages, "tools": tools}))
}

/// A template that takes the length of a content, and one that checks whether it exists.
#[test]
fn nothing_said_beside_a_call() {
    let messages = json!([{"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]);
    for (source, expected) in [
        ("{{ messages[0].content is none }}", "True"),
        ("{{ messages[0].content | length }}", "0"),
        ("{{ 'x' in messages[0].content }}", "False"),
        ("{{ messages[0].content + 'x' }}", "x"),
    ] {
        let template = ChatTemplate::new("t", source).unwrap();
        let rendered = text(messages.clone(), json!([]), &template).unwrap();
        assert_eq!(rendered.to_lowercase(), expected.to_lowercase(), "{source}");
    }
    // The template's own error is reported, not that of the second attempt.
    let template =
        ChatTemplate::new("t", "{{ raise_exception('no ' ~ (messages[0].content is none)) }}").unwrap();
    let error = text(messages, json!([]), &template).unwrap_err().to_string();
    assert!(error.to_lowercase().contains("no true"), "{error}");
}

#[test]
fn tools_have_a_template_of_their_own_where_there_is_one() {
    let config = json!({"chat_template": [
        {"name": "default", "template": "chat"}, {"name": "tool_use", "template": "tools {{ tools | length }}"}]});
    type Row<'t> = (&'t str, &'t [(&'t str, &'t str)], &'t str);
    let files: [Row<'_>; 4] = [
        ("a list", &[("tokenizer_config.json", &config.to_string())], "tools 1"),
        (
            "two files",
            &[("chat_template.jinja", "chat"), ("additional_chat_templates/tool_use.jinja", "tools 1")],
            "tools 1",
        ),
        ("one file", &[("chat_template.jinja", "chat")], "chat"),
        (
            "one of the list",
            &[("tokenizer_config.json", r#"{"chat_template": [{"name": "default", "template": "chat"}]}"#)],
            "chat",
        ),
    ];
    let message = json!([{"role": "user", "content": "x"}]);
    for (name, files, with_tools) in files {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
        for (file, text) in files {
            std::fs::write(folder.path().join(file), text).unwrap();
        }
        let template = ChatTemplate::from_folder(folder.path()).unwrap().unwrap();
        assert_eq!(text(message.clone(), json!([]), &template).unwrap(), "chat", "{name}");
        assert_eq!(text(message.clone(), json!([{}]), &template).unwrap(), with_tools, "{name}");
        assert_eq!(template.source(false), "chat", "{name}");
        assert!(template.source(true).starts_with(&with_tools[..4]), "{name}");
    }
}

#[test]
fn what_is_no_conversation_is_refused() {
    let template = ChatTemplate::new("t", "{{ x }}").unwrap();
    let messages = [json!({"role": "user"})];
    let kwargs: Map<String, Value> = [("messages".to_string(), json!([]))].into_iter().collect();
    let conversation =
        Conversation { messages: &messages, tools: &[], add_generation_prompt: true, kwargs: &kwargs };
    let error = template.render_conversation(&conversation, &tokenizer()).unwrap_err();
    assert!(
        matches!(&error, Error::Usage(what) if what.contains("chat_template_kwargs.messages")),
        "{error}"
    );
    let error = text(json!([{"role": "user"}, {"content": "x"}]), json!([]), &template).unwrap_err();
    assert!(matches!(&error, Error::Usage(what) if what.contains("messages[1]")), "{error}");
}

/// The limit for rendering these messages, and the peak memory of the rendering on this thread.
fn measured(
    template: &ChatTemplate,
    messages: &[Value],
    tools: &[Value],
) -> (usize, usize, Result<String, Error>) {
    let none = Map::new();
    let conversation = Conversation { messages, tools, add_generation_prompt: true, kwargs: &none };
    let tokenizer = tokenizer();
    let mut rendered = Ok(String::new());
    let taken = allocation_counter::measure(|| {
        rendered = template.render_conversation(&conversation, &tokenizer);
    });
    (conversation.rendering_bytes(), taken.bytes_max as usize, rendered)
}

/// Regression: templates had fuel but no memory bound. Each of these took gigabytes, or aborted the process on a failed
/// allocation.
#[test]
fn no_template_takes_more_than_it_may() {
    let grow = |step: &str| {
        format!(
            "{{% set ns = namespace(x='abcdefghijklmnop', l=[1]) %}}{{% for i in range(60) %}}{step}{{% endfor %}}{{{{ ns.x }}}}"
        )
    };
    let x = |value: &str| grow(&format!("{{% set ns.x = {value} %}}"));
    let l =
        |value: &str| grow(&format!("{{% set ns.l = {value} %}}{{% set ns.x = ns.l | string | length %}}"));
    let mut bad = Vec::new();
    let refusals = [
        "uses more than",
        "too long",
        "too large", // minijinja's own
        "nested more than 100 levels deep",
        "a namespace cannot be put into a namespace",
        "cannot include, import or extend",
        "debug is unknown",
    ];
    for source in [
        x("ns.x ~ ns.x"),
        x("ns.x + ns.x"),
        x("ns.x * 100"),
        x("100 * ns.x"),
        x("ns.x | replace('a', ns.x)"),
        x("ns.x.replace('', ns.x)"),
        x("ns.x | indent(1000000000)"),
        x("ns.x | indent(width=1000000000, first=true)"),
        x("[ns.x, ns.x] | join(ns.x)"),
        x("ns.x.join([ns.x, ns.x])"),
        x("ns.x | join(ns.x)"),
        x("(ns.x ~ '\\n') | indent(4) ~ ns.x"),
        x("'%1000000000d' | format(1)"),
        x("'%*d' | format(1000000000, 1)"),
        x("'{:>1000000000}'.format(1)"),
        x("'{:{}}'.format(1, 1000000000)"),
        x("'{0}{0}'.format(ns.x)"),
        x("'%s%s' | format(ns.x, ns.x)"),
        x("'%(a)s%(a)s' | format(a=ns.x)"),
        x("[ns.x, ns.x] | string"),
        x("[ns.x, ns.x] | tojson"),
        x("[ns.x, ns.x] | pprint"),
        x("ns.x | upper ~ ns.x | e"),
        x("(ns.x ~ ns.x)[::-1]"),
        x("dict(a=ns.x, b=ns.x) | tojson(indent=4)"),
        l("ns.l + ns.l"),
        l("ns.l * 100"),
        l("[ns.l, ns.l]"),
        l("(ns.l, ns.l)"),
        l("{'a': ns.l, 'b': ns.l}"),
        l("ns.l | zip(ns.l)"),
        l("ns.l | chain(ns.l) | list"),
        l("ns.l | batch(100000000, 1)"),
        l("ns.l | slice(100000000)"),
        l("range(99999) | list * 1000"),
        grow("{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}"),
        grow(
            "{% set x %}{% filter upper %}{{ ns.x }}{{ ns.x }}{% endfilter %}{% endset %}{% set ns.x = x %}",
        ),
        grow("{{ messages * 1000000 }}"),
        grow("{% for i in messages * 100000000 %}{{ i }}{% endfor %}"),
        grow("{{ ('ab' | list * 10000000) | join('abcdefgh') }}"),
        grow("{% macro m(a) %}{{ a }}{{ a }}{% endmacro %}{% set ns.x = m(ns.x) %}"),
        grow(
            "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}{% set x %}{% call m() %}{{ ns.x }}{% endcall %}{% endset %}{% set ns.x = x %}",
        ),
        format!("{{% for i in range(90000) %}}{}{{% endfor %}}", "raw".repeat(30_000)),
        format!(
            "{{% set x %}}{{% for i in range(90000) %}}{}{{% endfor %}}{{% endset %}}",
            "raw".repeat(30_000)
        ),
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}".into(),
        "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns == ns }}".into(),
        "{% set ns = namespace(l=[]) %}{% for i in range(90000) %}{% set ns.l = [ns.l] %}{% endfor %}".into(),
        "{{ dict(*(messages * 100000000)) }}".into(),
        "{{ debug() }}".into(),
        "{% include 'chat' %}".into(),
    ] {
        // Some are refused at compile time.
        let template = match ChatTemplate::new("the-file", &source) {
            Ok(template) => template,
            Err(error) => {
                assert!(error.to_string().contains("constants"), "{source}: {error}");
                continue;
            }
        };
        let messages = [json!({"role": "user", "content": "hello"})];
        let (may, took, rendered) = measured(&template, &messages, &[]);
        match rendered {
            Err(Error::Template { file, what })
                if file == "the-file" && took <= may && refusals.iter().any(|part| what.contains(part)) => {}
            other => {
                bad.push(format!("{:.200}: took {took} of {may}: {:?}", source, other.map(|text| text.len())))
            }
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// Regression: lazy lists over lazy lists, nested thousands deep, took a stack frame per level and crashed the process.
/// Sums of empty lists took unbounded memory.
#[test]
fn no_walk_is_inside_another() {
    let again = |first: &str, step: &str| {
        format!(
            "{{% set ns = namespace(l={first}) %}}{{% for i in range(30000) %}}{{% set ns.l = {step} %}}{{% endfor %}}{{{{ ns.l | length }}}}"
        )
    };
    let messages = [json!({"role": "user", "content": "hello"})];
    for (source, text) in [
        (again("[1]", "ns.l[0:]"), "1"),
        (again("[1]", "ns.l[::-1]"), "1"),
        (again("[1]", "ns.l * 1"), "1"),
        (again("[1]", "1 * ns.l[:9]"), "1"),
        (again("[1]", "ns.l | reverse"), "1"),
        (again("[1]", "(ns.l + [])[0:]"), "1"),
        (again("[1]", "ns.l | chain([][1:])"), "1"),
        (again("{'a': 1}", "ns.l | chain({'a': 2})"), "1"),
        (again("[]", "ns.l | zip"), "0"),
        (again("[]", "ns.l + ns.l"), "0"),
        (again("[]", "ns.l | chain(ns.l)"), "0"),
    ] {
        let template = ChatTemplate::new("t", &source).unwrap();
        let (may, took, rendered) = measured(&template, &messages, &[]);
        assert!(took <= may, "{source}: {took} of {may}");
        match rendered {
            Ok(rendered) => assert_eq!(rendered, text, "{source}"),
            Err(error) => assert!(error.to_string().contains("uses more than"), "{source}: {error}"),
        }
    }
    // The result is unchanged.
    for (source, text) in [
        ("{{ [1, 2, 3, 4][1:][1:] }}", "[3, 4]"),
        ("{{ ([1, 2][1:] * 2)[1:] + [5] }}", "[2, 5]"),
        ("{{ [1] | chain([2]) }}{{ ([1] | chain([2]))[1] }}", "[1, 2]2"),
        ("{{ ({'b': 1} | chain({'a': 2})).b }}{{ {'b': 1} | chain({'a': 2}) }}", "1{'a': 2, 'b': 1}"),
        ("{{ {'a': 1}.items()[0:] | list }}", "[('a', 1)]"),
        ("{{ [1, 2] | zip([3, 4][0:]) | list }}", "[(1, 3), (2, 4)]"),
        ("{{ dict({'a': 1}, b=2) }}{{ namespace(a=1).a }}", "{'a': 1, 'b': 2}1"),
        ("{{ [1, 2, 3] | select('in', [2, 3]) | list }}", "[2, 3]"),
    ] {
        let template = ChatTemplate::new("t", source).unwrap();
        assert_eq!(self::text(json!([]), json!([]), &template).unwrap(), text, "{source}");
    }
}

/// Regression: a repeated list of large lists was compared with another for hours, in a single instruction.
#[test]
fn no_comparison_is_without_an_end() {
    let messages = [json!({"role": "user", "content": "hello"})];
    for compare in [
        "{{ a in [b] * n }}",
        "{{ [a] * n == [b] * n }}",
        "{{ [a] * n < [b] * n }}",
        "{{ ([b] * n) | sort }}",
        "{{ ([b] * n) | unique }}",
        "{{ {([b] * n): 1} }}",
        "{% set ns = namespace(l=[b]) %}{% for i in range(20) %}{% set ns.l = ns.l + ns.l %}{% endfor %}{{ a in ns.l }}",
        "{% set l = [b] * 300 %}{% set l = l + l %}{% set l = l + l %}{{ a in l }}",
    ] {
        let source = format!(
            "{{% set n = 1000000 %}}{{% set a = range(1500) | list + [1] %}}{{% set b = range(1500) | list + [2] %}}{compare}"
        );
        let template = ChatTemplate::new("t", &source).unwrap();
        let (_, _, rendered) = measured(&template, &messages, &[]);
        let error = rendered.unwrap_err().to_string();
        assert!(error.contains("uses more than"), "{compare}: {error}");
    }
}

/// Regression: macro closures, digits of numbers and copies of maps were not charged.
#[test]
fn what_was_free_is_paid() {
    let messages = [json!({"role": "user", "content": "hello"})];
    for step in [
        "{% for j in range(1000) %}{% set x = j %}{% macro m() %}{{ x }}{% endmacro %}{% endfor %}",
        "{{ 1e308 }}{{ 1e308 }}{{ 1e308 }}{{ 1e308 }}{{ -5e-324 }}{{ 1e308 ~ 1e308 }}",
        "{% set ns.l = ns.l + [dict(m)] %}",
        "{{ ([1e308] * (i * 100)) in 'a' }}",
        "{% set ns.l = ns.l + [dict(namespace(m))] %}",
    ] {
        let source = format!(
            "{{% set ns = namespace(l=[]) %}}{{% set m = {{'a': 1, 'b': 2, 'c': 3, 'd': 4}} %}}{{% for i in range(90000) %}}{step}{{% endfor %}}"
        );
        let template = ChatTemplate::new("t", &source).unwrap();
        let (may, took, rendered) = measured(&template, &messages, &[]);
        assert!(took <= may, "{step}: {took} of {may}");
        let error = rendered.unwrap_err().to_string();
        assert!(error.contains("uses more than"), "{step}: {error}");
    }
}

/// Regression: a list that grows with every message was charged for each earlier version; conversations from about
/// 1,670 messages on were refused.
#[test]
fn a_list_grows_by_every_message() {
    let messages: Vec<Value> =
        (0..4000).map(|i| json!({"role": "user", "content": format!("{i}")})).collect();
    let source = "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m] %}{% endfor %}{{ ns.l | length }}";
    let template = ChatTemplate::new("t", source).unwrap();
    let (may, took, rendered) = measured(&template, &messages, &[]);
    assert_eq!(rendered.unwrap(), "4000");
    assert!(took <= may, "{took} of {may}");
}

/// Regression: the compiler evaluates constants, and the process crashed before anything was rendered.
#[test]
fn constants_are_bounded() {
    for source in [
        "{{ 'abc' * 100000000 }}",
        "{{ ('abc' * 1000) * 100000 }}",
        "{{ 'abc' * 10 ** 8 }}",
        "{{ 'a' * (99999999 + 1) ~ 'b' }}",
        "{{ (1, 2) * 100000000 }}",
        "{{ 'x' ~ [1] * 100000000 }}",
        &"{{ 'aaaaaaaa' * 100000 }}".repeat(1000),
    ] {
        let error = ChatTemplate::new("the-file", source).unwrap_err().to_string();
        assert!(error.contains("the-file") && error.contains("constants"), "{error}");
    }
    for (source, text) in
        [("{{ '=' * 40 }}", "=".repeat(40)), ("{{ 1024 * 1024 * 1024 * 4 }}", (1_u64 << 32).to_string())]
    {
        let template = ChatTemplate::new("t", source).unwrap();
        assert_eq!(self::text(json!([]), json!([]), &template).unwrap(), text);
    }
}

/// Templates of real models stay far within the limits: a thousand turns, and tools with large schemas.
#[test]
fn long_conversations_are_rendered() {
    let turn = |i: usize| {
        let role = if i.is_multiple_of(2) { "user" } else { "assistant" };
        json!({"role": role, "content": format!("{i}: {}", "What is ownership, and who borrows? ".repeat(12))})
    };
    let messages: Vec<Value> = (0..1001).map(turn).collect();
    let field = |i: usize| {
        (format!("field_{i}"), json!({"type": "string", "description": "What it is for. ".repeat(8)}))
    };
    let properties: Map<String, Value> = (0..40).map(field).collect();
    let tool = |i: usize| {
        json!({"type": "function", "function": {"name": format!("tool_{i}"), "description": "What it does.",
            "parameters": {"type": "object", "properties": properties}}})
    };
    let tools: Vec<Value> = (0..64).map(tool).collect();
    let own = [
        // A list sliced again for every message, and one that grows.
        "{% for m in messages %}{{ messages[loop.index0:] | length }}{{ m.role }}{{ m.content }}{% endfor %}",
        "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m] %}{% endfor %}{{ ns.l | length }}",
        "{% for m in messages[::-1] %}{{ ('<' + m.role + '>' + m['content'] | trim + '</s>').strip().split('\n')[-1] }}{% endfor %}",
    ];
    let models = ["deepseek", "hermes", "llama", "qwen"].map(|name| fixtures().join(format!("{name}.jinja")));
    let models = models.map(|path| std::fs::read_to_string(path).unwrap());
    for source in own.iter().copied().chain(models.iter().map(String::as_str)) {
        let template = ChatTemplate::new("t", source).unwrap();
        for tools in [&[], &tools[..]] {
            let (may, took, rendered) = measured(&template, &messages, tools);
            let rendered = rendered.unwrap_or_else(|e| panic!("{e}: {source}"));
            assert!(took <= may, "{took} of {may}");
            assert!(rendered.len() > 3, "{source}");
        }
    }
}

/// Regression: a body of 62 KB, a default nested a hundred levels deep with many leaves, and `tojson(indent=4)` took 12
/// s and 0.8 GB.
#[test]
fn nested_defaults_are_bounded() {
    let nested = |depth: usize, leaves: usize| {
        let leaves = Value::from(vec![1; leaves]);
        let default = (0..depth).fold(leaves, |inner, _| json!([inner]));
        json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object",
            "properties": {"a": {"default": default}}}}})
    };
    let template =
        ChatTemplate::new("t", "{% for i in range(9) %}{{ tools | tojson(indent=16) }}{% endfor %}").unwrap();
    let messages = [json!({"role": "user", "content": "hello"})];
    let (_, _, deep) = measured(&template, &messages, &[nested(2, 1), nested(90, 30_000)]);
    assert!(matches!(&deep, Err(Error::Usage(what)) if what.contains("`tools[1]` is nested")), "{deep:?}");
    let (may, took, wide) = measured(&template, &messages, &[nested(50, 30_000)]);
    assert!(
        matches!(&wide, Err(Error::Template { what, .. }) if what.contains(&may.to_string())),
        "{:?}",
        wide.err()
    );
    assert!(took <= may, "{took} of {may}");
}
