_headrace() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} path= words= word
  [[ $cur == "=" ]] && cur=
  [[ $prev == "=" ]] && prev=${COMP_WORDS[COMP_CWORD-2]}
  local shared="@shared@"
  case $prev in
@values@
    *)
      for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case "$path $word" in @paths@) path="$path $word" ;; esac
      done
      case "$path" in
@commands@
      esac ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -o default -F _headrace headrace
