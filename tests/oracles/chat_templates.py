"""Two small chat templates with the habits of the model family: one plain, one that keeps only the newest reasoning."""

PLAIN = r"""
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' + m.content }}
    {%- for c in m.tool_calls or [] %}
        {{- '<tool_call>' + c.function.name + (c.function.arguments | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

# Reasoning stands only behind the last user message; a system message is taken only in front.
THINKING = r"""
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}
    {%- if m.role == 'assistant' and loop.index0 > last.user %}
        {{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}
    {%- endif %}
    {{- m.content | trim }}
    {%- for c in m.tool_calls or [] %}
        {{- '<tool_call>' + c.function.name }}
        {%- for key, value in c.function.arguments | items %}{{- '|' + key + '=' + (value | tojson) }}{%- endfor %}
        {{- '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n<think>\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""
